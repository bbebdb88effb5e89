"""Exact attention over paged keys and values."""

from ctypes import byref

from . import _arrays as arrays
from ._library import DTYPES, ArgumentError, DenseProblem, DenseTensors, Handle, Tensor, checked, library

PAGE = 16


class Decode:
    """Attention of the last ``query_tokens`` tokens of each of ``sequences``, over keys and values in pages of 16.

    Softmax of the scores over the square root of ``head_dim``, float16 or bfloat16 in, float32 out. The result depends
    on the extents here and on what is read, and on nothing else: the bits are the same on every device, wherever pages
    lie. ``max_tokens`` and ``sequences`` decide how the work is cut, so that others may give other bits.

    >>> decode = ferrokv.Decode(sequences=8, q_heads=32, kv_heads=8, head_dim=128, max_tokens=4096, device="cuda")
    >>> out, lse = decode(queries, pages, table, lengths)

    Keep the plan, and everything that a captured call was given, for as long as the graph runs.
    """

    def __init__(self, *, sequences, q_heads, kv_heads, head_dim, max_tokens, query_tokens=1, dtype="float16",
                 device="cuda"):
        """All scratch is allocated here. Query heads are a multiple of KV heads, 16 times at most; ``head_dim`` is 64,
        96, 128 or 256."""
        self.dtype, self.where = arrays.dtype_name(dtype), arrays.Where(device)
        if self.dtype not in ("float16", "bfloat16"):
            raise ArgumentError(f"dtype is {self.dtype}; give float16 or bfloat16")
        extents = dict(sequences=sequences, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
                       query_tokens=query_tokens, max_tokens=max_tokens)
        extents = {name: arrays.extent(name, value) for name, value in extents.items()}
        self.sequences, self.q_heads, self.kv_heads = sequences, q_heads, kv_heads
        self.head_dim, self.query_tokens, self.max_tokens = head_dim, query_tokens, max_tokens
        self.max_pages = -(-max_tokens // PAGE)
        with self.where.chosen():
            self._handle = Handle(library.ferrokv_dense_create, library.ferrokv_dense_destroy, self.where.handle(),
                                  DTYPES[self.dtype], byref(DenseProblem(**extents)))
        self._kept = arrays.Kept()
        # Room for tables of half pages: of PyTorch already here, for a first call may be in a capture.
        self._tables = {}
        if arrays.torch() is not None:
            self._tables[True] = self.where.empty([self.sequences, self.max_pages], "int32")

    @property
    def splits(self):
        """Into how many parts a sequence of the full length is cut."""
        return library.ferrokv_dense_splits(self._handle.value)

    def __call__(self, queries, pages, table, lengths, *, out=None, lse=None):
        """``(out, lse)``: attention like the queries, in float32, and the natural logarithm of the sum of exponentials
        [sequences, query_tokens, q_heads], in float32.

        queries
            [sequences, q_heads, head_dim], or [sequences, query_tokens, q_heads, head_dim].
        pages
            [pages, 2, kv_heads, 16, head_dim], keys before values (FlashInfer's ``HND``), or a pair of [pages,
            kv_heads, 16, head_dim]; neither is copied.
        table
            [sequences, at least max_tokens / 16] int32: the pages of each sequence, in order. Entries past a
            sequence's length are not looked at.
        lengths
            [sequences] int32.
        out, lse
            Where the results go; new ones by default.

        On a GPU an entry that is no page, or a length beyond ``max_tokens``, is not noticed, and reads other memory;
        on the CPU it is an error.
        """
        where, paired = self.where, not isinstance(pages, (tuple, list))
        given = {"queries": queries, "table": table, "lengths": lengths}
        given.update({"pages": pages} if paired else {f"pages[{i}]": side for i, side in enumerate(pages)})
        taken = {name: arrays.taken(name, value) for name, value in given.items()}
        queries, table, lengths = (taken[name] for name in ("queries", "table", "lengths"))
        pages = taken["pages"] if paired else [taken[f"pages[{i}]"] for i in range(len(pages))]
        arrays.where_is("queries", queries)
        rows = [self.sequences] if len(queries.shape) == 3 and self.query_tokens == 1 else [self.sequences,
                                                                                           self.query_tokens]
        shape = [*rows, self.q_heads, self.head_dim]
        arrays.contiguous("queries", arrays.check("queries", queries, where, self.dtype, shape))
        arrays.contiguous("lengths", arrays.check("lengths", lengths, where, "int32", [self.sequences]))
        keys, values = self._pool(pages)
        if out is None:
            out = where.empty(shape, "float32", queries)
        else:
            arrays.contiguous("out", arrays.writable("out", arrays.check("out", out, where, "float32", shape)))
        if lse is None:
            lse = where.empty(shape[:-1], "float32", queries)
        else:
            arrays.contiguous("lse", arrays.writable("lse", arrays.check("lse", lse, where, "float32", shape[:-1])))
        with where.chosen():
            table = self._table(table, paired)
            tensors = DenseTensors(arrays.tensor(queries), keys, values, arrays.tensor(table), arrays.tensor(lengths),
                                   arrays.tensor(out), arrays.tensor(lse))
            checked(library.ferrokv_dense_run(self._handle.value, where.stream(), byref(tensors)))
            self._kept.until_done(where, given.values(), taken.values())
        return out, lse

    def _pool(self, pages):
        """Keys and values as the library takes them."""
        block = self.kv_heads * PAGE * self.head_dim
        of_page = [None, self.kv_heads, PAGE, self.head_dim]
        if isinstance(pages, (tuple, list)):
            if len(pages) != 2:
                raise ArgumentError(f"pages are {len(pages)} tensors; give keys and values, or one tensor of both")
            keys, values = pages
            for name, side in (("keys", keys), ("values", values)):
                arrays.contiguous(name, arrays.check(name, side, self.where, self.dtype, of_page))
            if keys.shape[0] != values.shape[0]:
                raise ArgumentError(f"keys have {keys.shape[0]} pages, and values {values.shape[0]}; give as many of both")
            return arrays.tensor(keys), arrays.tensor(values)
        arrays.contiguous("pages", arrays.check("pages", pages, self.where, self.dtype, [None, 2, *of_page[1:]]))
        if pages.shape[0] == 0:
            raise ArgumentError("pages are 0; give at least one")
        # Halves of pages as blocks: block 2p has the keys of page p, and seen from one block further on its values.
        first, dtype = arrays.address(pages), DTYPES[self.dtype]
        blocks = 2 * pages.shape[0] - 1
        size = 2 * block
        return Tensor(first, blocks * block, dtype, 0), Tensor(first + size, blocks * block, dtype, 0)

    def _table(self, table, paired):
        """The table with entries that number halves of pages where these are paired, and no wider than it has to be."""
        shape = [self.sequences, None]
        arrays.check("table", table, self.where, "int32", shape)
        if table.shape[1] < self.max_pages:
            raise ArgumentError(f"table has {table.shape[1]} pages of a sequence, and {self.max_tokens} tokens have "
                                f"{self.max_pages}; give it so wide, with any entries past the length")
        exact = table.shape[1] == self.max_pages
        if exact and not paired:
            return arrays.contiguous("table", table)
        part = table[:, :self.max_pages]
        if arrays.is_tensor(table) not in self._tables:
            self._tables[arrays.is_tensor(table)] = self.where.empty([self.sequences, self.max_pages], "int32", table)
        own = self._tables[arrays.is_tensor(table)]
        if arrays.is_tensor(table):
            arrays.torch().mul(part, 2 if paired else 1, out=own)
        else:
            own[:] = part * (2 if paired else 1)
        return own
