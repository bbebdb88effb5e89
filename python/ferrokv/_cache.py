"""Keys and values of a model's layers, as any scheme keeps them."""

from ctypes import byref, c_uint32

from . import _arrays as arrays
from ._library import CacheExtents, Handle, StateError, checked, library

# Where the token of a row goes whose sequence is not there: past the end of every sequence.
PARKED = -(1 << 31)


class KvCache:
    """Keys and values of ``layers`` layers and up to ``sequences`` sequences, in float16 or in the codes of ``scheme``:
    a name of :func:`ferrokv.schemes` with preset and options, as the command's ``--kv`` has it (``"int8-int4"``,
    ``"certified:strict"``, ``"gtq/k=4"``).

    A new cache has sequence 0, empty. What is appended comes a chunk at a time, in every layer:

    >>> cache.begin_prompt(0, tokens)              # or cache.begin_step(): a token of every sequence
    >>> for layer in range(layers):
    ...     cache.append(layer, keys, values)      # [rows, kv_heads, head_dim], keys after their rotation
    ...     out = cache.attend(layer, queries)     # [rows, q_heads, head_dim], in float32
    >>> cache.commit()

    Rows are the prompt's tokens, or for a step the sequences that there is room for, in the order of their numbers;
    what rows without a sequence get is unspecified. Keys and values of a step whose attention is not asked for are not
    complete in some schemes.

    **Graphs.** Appending and attention of a step can be captured once a first step has run. The positions, which are on
    the device, then count up in the graph, by :meth:`advance`, and not in :meth:`commit`::

        cache.begin_step()
        with torch.cuda.graph(graph):
            ...append and attend in every layer...
            cache.advance()
        graph.replay()
        cache.commit(advance=False)
        # and for every step from then on
        cache.begin_step(); graph.replay(); cache.commit(advance=False)

    Where :attr:`period` is not 1, so many graphs take turns: step n is a run of graph n % period, captured when a step of
    its kind has run. Keep the cache, and all that captured calls were given, for as long as the graph runs.
    """

    def __init__(self, scheme, *, layers, q_heads, kv_heads, head_dim, max_tokens, sequences=1, device="cuda"):
        self.where = arrays.Where(device)
        extents = dict(layers=layers, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, max_tokens=max_tokens,
                       sequences=sequences)
        extents = {name: arrays.extent(name, value) for name, value in extents.items()}
        self.scheme, self.layers, self.sequences = scheme, layers, sequences
        self.q_heads, self.kv_heads, self.head_dim, self.max_tokens = q_heads, kv_heads, head_dim, max_tokens
        with self.where.chosen():
            self._handle = Handle(library.ferrokv_cache_create, library.ferrokv_cache_destroy, self.where.handle(),
                                  str(scheme).encode(), byref(CacheExtents(**extents)))
        # Where the next token of each sequence goes; of PyTorch if it is there.
        self._next = self.where.empty([sequences], "int32")
        self._place()
        self._chunk, self._kept = None, arrays.Kept()

    def _call(self, function, *arguments):
        with self.where.chosen():
            checked(function(self._handle.value, self.where.stream(), *arguments))

    def _place(self):
        """Writes where the next token of each sequence goes."""
        tokens = [self.tokens(sequence) for sequence in range(self.sequences)]
        for sequence, count in enumerate(tokens):
            self._next[sequence] = PARKED if count is None else count

    def tokens(self, sequence=0):
        """Tokens of a sequence; None where none is there."""
        tokens = library.ferrokv_cache_tokens(self._handle.value, arrays.extent("sequence", sequence))
        return None if tokens < 0 else tokens

    @property
    def bytes(self):
        """Bytes of the device's memory that the committed tokens take."""
        return library.ferrokv_cache_bytes(self._handle.value)

    @property
    def period(self):
        """After how many steps what they launch is the same again."""
        return library.ferrokv_cache_period(self._handle.value)

    def join(self):
        """A sequence more, empty: its number. Waits."""
        return self._numbered(library.ferrokv_cache_join)

    def fork(self, source):
        """A sequence more, with the tokens of ``source``, whose memory both use as far as they can: its number. Waits."""
        return self._numbered(library.ferrokv_cache_fork, arrays.extent("source", source))

    def _numbered(self, function, *arguments):
        number = c_uint32()
        self._chunk = None
        self._call(function, *arguments, byref(number))
        self._place()
        return number.value

    def leave(self, sequence):
        """Forgets a sequence: its number is free. Waits."""
        self._chunk = None
        self._call(library.ferrokv_cache_leave, arrays.extent("sequence", sequence))
        self._place()

    def begin_prompt(self, sequence, tokens):
        """Begins a chunk of ``tokens`` tokens of a sequence, behind those that it has. May allocate and wait."""
        self._chunk = None
        sequence, tokens = arrays.extent("sequence", sequence), arrays.extent("tokens", tokens)
        self._call(library.ferrokv_cache_begin_prompt, sequence, tokens)
        first = self.tokens(sequence)
        positions = self.where.empty([tokens], "int32", self._next)
        if arrays.is_tensor(positions):
            arrays.torch().arange(first, first + tokens, dtype=positions.dtype, out=positions)
        else:
            positions[:] = range(first, first + tokens)
        self._chunk = (sequence, tokens, positions)

    def begin_step(self):
        """Begins a step: a token of every sequence that is there. Nothing happens on the device."""
        self._chunk = None
        self._call(library.ferrokv_cache_begin_step)
        self._chunk = (None, self.sequences, self._next)

    def _begun(self):
        if self._chunk is None:
            raise StateError("no chunk was begun; call begin_prompt or begin_step first")
        return self._chunk

    def append(self, layer, keys, values):
        """Adds the chunk's keys and values, both [rows, kv_heads, head_dim] float16, to a layer."""
        _, rows, positions = self._begun()
        shape = [rows, self.kv_heads, self.head_dim]
        given = keys, values
        keys, values = arrays.taken("keys", keys), arrays.taken("values", values)
        for name, value in (("keys", keys), ("values", values)):
            arrays.contiguous(name, arrays.check(name, value, self.where, "float16", shape))
        self._call(library.ferrokv_cache_append, arrays.extent("layer", layer),
                   *(byref(arrays.tensor(x)) for x in (positions, keys, values)))
        self._kept.until_done(self.where, given, (keys, values))

    def attend(self, layer, queries, *, out=None):
        """Causal attention of the chunk's tokens in a layer that has their keys and values: like the queries [rows,
        q_heads, head_dim] float16, in float32, to ``out`` if it is given."""
        _, rows, _ = self._begun()
        shape, given = [rows, self.q_heads, self.head_dim], queries
        queries = arrays.taken("queries", queries)
        arrays.contiguous("queries", arrays.check("queries", queries, self.where, "float16", shape))
        if out is None:
            out = self.where.empty(shape, "float32", queries)
        else:
            arrays.contiguous("out", arrays.writable("out", arrays.check("out", out, self.where, "float32", shape)))
        self._call(library.ferrokv_cache_attend, arrays.extent("layer", layer),
                   *(byref(arrays.tensor(x)) for x in (queries, out)))
        self._kept.until_done(self.where, [given], [queries])
        return out

    def advance(self):
        """Counts up where the next token of each sequence goes, in the current stream: the last thing of a captured
        step."""
        self._next += 1

    def commit(self, *, advance=True):
        """The chunk is in all layers: from now on it counts. ``advance=False`` after a graph that has
        :meth:`advance`."""
        sequence, rows, _ = self._begun()
        checked(library.ferrokv_cache_commit(self._handle.value))
        self._chunk = None
        if sequence is not None:
            self._next[sequence:sequence + 1] += rows
        elif advance:
            self.advance()

    def check(self):
        """Waits, and raises if a key or value was appended that the scheme does not take."""
        self._call(library.ferrokv_cache_check)
