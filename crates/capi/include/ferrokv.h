/* Ferrokv's attention and quantization on memory and streams that the caller owns.
 *
 * Statuses. A function that can fail returns a ferrokv_status; where that is not FERROKV_OK, ferrokv_last_error() has
 * a message in English: what is wrong, its value, and the way out.
 *
 * Handles. A create or an open writes a handle to *out (NULL if it fails); destroy and close end it and take NULL.
 * Plans and caches keep their device, so handles may end in any order. They may be used from several threads: what
 * has scratch is locked for the length of a call. But the work of two calls of one handle uses the same scratch on the
 * GPU: put them into one stream, or order their streams by an event. A run of a captured call counts as one.
 *
 * Streams. `stream` is a CUstream (a cudaStream_t is the same) of the device's primary context, NULL for the legacy
 * default stream; on the CPU it is not looked at. Nothing else may be put into it during the call. Work goes behind
 * what is in it. What is said to wait fails with FERROKV_STATE while the stream captures; everything else may be
 * captured: it launches, allocates nothing and waits for nothing.
 *
 * Tensors. Elements one after another, of the device that the plan is for: checked are type, number and alignment (16
 * bytes; 4 for int32), not that the memory is there. It stays, and nothing else writes it, until the work is done;
 * for a capture, until the last run of the graph.
 *
 * On the CPU a call has finished when it returns, and what it writes has the bits that a GPU writes.
 */
#ifndef FERROKV_H
#define FERROKV_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The number of this interface: compare it with ferrokv_abi(). */
#define FERROKV_ABI 1

typedef enum ferrokv_status {
    FERROKV_OK = 0,
    FERROKV_ARGUMENT = 1,    /* an argument is wrong; nothing was done */
    FERROKV_UNAVAILABLE = 2, /* no such device, no driver, or no kernels for it */
    FERROKV_MEMORY = 3,      /* the memory is not there */
    FERROKV_STATE = 4,       /* the call does not fit what was called before it */
    FERROKV_DEVICE = 5,      /* the device failed; a GPU may say so at a later call */
    FERROKV_INTERNAL = 6     /* a mistake of the library */
} ferrokv_status;

typedef enum ferrokv_dtype {
    FERROKV_F32 = 0,
    FERROKV_F16 = 1,
    FERROKV_BF16 = 2,
    FERROKV_I8 = 3,
    FERROKV_I32 = 4
} ferrokv_dtype;

typedef struct ferrokv_device ferrokv_device;
typedef struct ferrokv_dense ferrokv_dense;
typedef struct ferrokv_int8 ferrokv_int8;
typedef struct ferrokv_cache ferrokv_cache;

typedef struct ferrokv_tensor {
    void *data;        /* the first element; a device pointer on a GPU */
    uint64_t elements; /* how many there are */
    uint32_t dtype;    /* a ferrokv_dtype */
    uint32_t reserved; /* 0 */
} ferrokv_tensor;

/* The interface that the loaded library has. */
uint32_t ferrokv_abi(void);
/* Its version, such as "0.1.0". */
const char *ferrokv_version(void);
/* The schemes of ferrokv_cache_create, with spaces between. */
const char *ferrokv_schemes(void);
/* The message of the last call of this thread that failed; there until the next one fails. */
const char *ferrokv_last_error(void);

/* ---- devices ---- */

ferrokv_status ferrokv_device_open_cpu(ferrokv_device **out);
/* GPU number `ordinal` in its primary context, which the CUDA runtime uses as well. */
ferrokv_status ferrokv_device_open_cuda(uint32_t ordinal, ferrokv_device **out);
/* There as long as the handle. */
const char *ferrokv_device_name(const ferrokv_device *device);
void ferrokv_device_close(ferrokv_device *device);

/* A tensor that another library hands over by DLPack, as one of this: `dl_tensor` is a `DLTensor *` of dlpack.h, which
 * lies in a `DLManagedTensor` and in a `DLManagedTensorVersioned`. It must be of the device and of one of the types
 * above, with elements one after another. Of a versioned one look at version.major, which must be 1, and at its flags:
 * what is read-only is no place for results. The other library's work on the memory must be ordered with `stream`.
 * Nothing is copied and nothing kept: give the managed tensor back, by its deleter, when the work is done. */
ferrokv_status ferrokv_tensor_from_dlpack(const ferrokv_device *device, const void *dl_tensor, ferrokv_tensor *out);

/* ---- exact attention over a paged pool ---- */

typedef struct ferrokv_dense_problem {
    uint32_t sequences;
    uint32_t q_heads;      /* a multiple of kv_heads, 16 times at most */
    uint32_t kv_heads;
    uint32_t head_dim;     /* 64, 96, 128 or 256 */
    uint32_t query_tokens; /* the last tokens of each sequence; each sees those before it and itself */
    uint32_t max_tokens;   /* of a sequence */
} ferrokv_dense_problem;

/* A pool is [blocks, kv_heads, 16, head_dim]. Where keys and values are pages of one array, [pages, 2, kv_heads, 16,
 * head_dim]: `keys` begins with the first page, `values` 16 * kv_heads * head_dim elements further, both have one
 * block less than the array, and the entries of the table are twice the numbers of the pages. */
typedef struct ferrokv_dense_tensors {
    ferrokv_tensor queries; /* [sequences, query_tokens, q_heads, head_dim], of the plan's type */
    ferrokv_tensor keys;    /* [blocks, kv_heads, 16, head_dim], of the plan's type */
    ferrokv_tensor values;  /* likewise */
    ferrokv_tensor table;   /* [sequences, ceil(max_tokens / 16)] int32: each sequence's blocks in order */
    ferrokv_tensor lengths; /* [sequences] int32 */
    ferrokv_tensor output;  /* as the queries, float32; zeros for a token that sees no key */
    ferrokv_tensor lse;     /* [sequences, query_tokens, q_heads] float32: natural log-sum-exp; data NULL for none */
} ferrokv_dense_tensors;

/* `element`: FERROKV_F16 or FERROKV_BF16. All scratch is allocated here. */
ferrokv_status ferrokv_dense_create(const ferrokv_device *device, uint32_t element,
                                    const ferrokv_dense_problem *problem, ferrokv_dense **out);
/* Softmax of the scores divided by sqrt(head_dim). Each length is at most ceil(max_tokens / 16) * 16 and each entry of
 * the table that it reaches a block of the pool: checked on the CPU, the caller's word on a GPU. */
ferrokv_status ferrokv_dense_run(const ferrokv_dense *dense, void *stream, const ferrokv_dense_tensors *tensors);
/* Parts that a sequence of the full length is cut into: error bounds depend on it. */
uint32_t ferrokv_dense_splits(const ferrokv_dense *dense);
void ferrokv_dense_destroy(ferrokv_dense *dense);

/* ---- a matrix to 8 bits and back ---- */

/* Row-major [tokens, channels] of FERROKV_F32, FERROKV_F16 or FERROKV_BF16. `variant`: "wide" (or NULL) has a scale
 * for each channel, "fused" one for each channel of 16 tokens. */
ferrokv_status ferrokv_int8_create(const ferrokv_device *device, uint32_t element, uint64_t tokens,
                                   uint64_t channels, const char *variant, ferrokv_int8 **out);
/* How many scales there are. */
uint64_t ferrokv_int8_scales(const ferrokv_int8 *int8);
/* `codes` [tokens, channels] int8, `scales` float32. */
ferrokv_status ferrokv_int8_quantize(const ferrokv_int8 *int8, void *stream, const ferrokv_tensor *matrix,
                                     const ferrokv_tensor *codes, const ferrokv_tensor *scales);
ferrokv_status ferrokv_int8_dequantize(const ferrokv_int8 *int8, void *stream, const ferrokv_tensor *codes,
                                       const ferrokv_tensor *scales, const ferrokv_tensor *matrix);
void ferrokv_int8_destroy(ferrokv_int8 *int8);

/* ---- keys and values of a model's layers, by any scheme ---- */

typedef struct ferrokv_cache_extents {
    uint32_t layers;
    uint32_t q_heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t max_tokens; /* of a sequence */
    uint32_t sequences;
} ferrokv_cache_extents;

/* A step of a model: begin, then for each layer append and attend, then commit. `scheme` is NAME[:PRESET][/OPTION=
 * VALUE]..., as the command's --kv has it. A new cache has sequence 0, empty. After a call of append, attend or check
 * that failed with FERROKV_DEVICE it is not to be used further. */
ferrokv_status ferrokv_cache_create(const ferrokv_device *device, const char *scheme,
                                    const ferrokv_cache_extents *extents, ferrokv_cache **out);
/* One sequence more, empty, or with the tokens of another; one fewer. They wait for the stream. */
ferrokv_status ferrokv_cache_join(const ferrokv_cache *cache, void *stream, uint32_t *sequence);
ferrokv_status ferrokv_cache_fork(const ferrokv_cache *cache, void *stream, uint32_t source, uint32_t *sequence);
ferrokv_status ferrokv_cache_leave(const ferrokv_cache *cache, void *stream, uint32_t sequence);
/* Tokens of one sequence, behind those that it has. May allocate and wait. */
ferrokv_status ferrokv_cache_begin_prompt(const ferrokv_cache *cache, void *stream, uint32_t sequence,
                                          uint32_t tokens);
/* A token of every sequence that is there. Nothing happens on the device. */
ferrokv_status ferrokv_cache_begin_step(const ferrokv_cache *cache, void *stream);
/* Rows are the prompt's tokens; of a step, the sequences that there is room for. `positions` [rows] int32: where each
 * token belongs in its sequence, negative for a row whose sequence is not there. `keys` (turned by their positions)
 * and `values` [rows, kv_heads, head_dim] float16. */
ferrokv_status ferrokv_cache_append(const ferrokv_cache *cache, void *stream, uint32_t layer,
                                    const ferrokv_tensor *positions, const ferrokv_tensor *keys,
                                    const ferrokv_tensor *values);
/* `queries` [rows, q_heads, head_dim] float16, `output` likewise in float32. */
ferrokv_status ferrokv_cache_attend(const ferrokv_cache *cache, void *stream, uint32_t layer,
                                    const ferrokv_tensor *queries, const ferrokv_tensor *output);
/* The chunk counts from now on. Around each run of a graph that has a step's launches: begin_step before, this behind. */
ferrokv_status ferrokv_cache_commit(const ferrokv_cache *cache);
/* Waits; fails if a key or value was appended that the scheme does not take. */
ferrokv_status ferrokv_cache_check(const ferrokv_cache *cache, void *stream);
/* Tokens of a sequence; -1 where none is there. */
int64_t ferrokv_cache_tokens(const ferrokv_cache *cache, uint32_t sequence);
/* Bytes of the device's memory that the committed tokens take. */
uint64_t ferrokv_cache_bytes(const ferrokv_cache *cache);
/* After how many steps what they launch is the same again: as many graphs take turns. */
uint32_t ferrokv_cache_period(const ferrokv_cache *cache);
void ferrokv_cache_destroy(ferrokv_cache *cache);

#ifdef __cplusplus
}
#endif

#endif
