/* A caller in C: attention over two blocks, codes of a matrix, a step of a cache, and calls that must fail. */
#include "ferrokv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = 64, BLOCK = 16 };

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, ferrokv_last_error());                  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static ferrokv_tensor tensor(void *data, uint64_t elements, uint32_t dtype) {
    ferrokv_tensor tensor = {data, elements, dtype, 0};
    return tensor;
}

/* Memory that is aligned to 16 bytes. */
static void *memory(size_t bytes) {
    void *data = malloc(bytes + 32);
    CHECK(data != NULL);
    memset(data, 0, bytes + 32);
    return (void *)(((uintptr_t)data + 15) / 16 * 16);
}

/* 1.0 and 2.0 in binary16. */
enum { ONE = 0x3c00, TWO = 0x4000 };

static void attention(const ferrokv_device *device) {
    ferrokv_dense_problem problem = {1, 2, 1, DIM, 1, 32};
    ferrokv_dense *dense = NULL;
    CHECK(ferrokv_dense_create(device, FERROKV_F16, &problem, &dense) == FERROKV_OK);
    CHECK(ferrokv_dense_splits(dense) == 1);

    /* Values of 1 in block 1, of 2 in block 0; keys of zeros, so every token has the same weight. */
    uint16_t *queries = memory(2 * DIM * 2), *keys = memory(2 * BLOCK * DIM * 2), *values = memory(2 * BLOCK * DIM * 2);
    float *output = memory(2 * DIM * 4), *lse = memory(2 * 4);
    int32_t *table = memory(2 * 4), *lengths = memory(4);
    for (int i = 0; i < BLOCK * DIM; i++) {
        values[i] = TWO;
        values[BLOCK * DIM + i] = ONE;
    }
    table[0] = 1;
    table[1] = 0;
    lengths[0] = 24;
    ferrokv_dense_tensors tensors = {
        tensor(queries, 2 * DIM, FERROKV_F16),        tensor(keys, 2 * BLOCK * DIM, FERROKV_F16),
        tensor(values, 2 * BLOCK * DIM, FERROKV_F16), tensor(table, 2, FERROKV_I32),
        tensor(lengths, 1, FERROKV_I32),              tensor(output, 2 * DIM, FERROKV_F32),
        tensor(lse, 2, FERROKV_F32),
    };
    CHECK(ferrokv_dense_run(dense, NULL, &tensors) == FERROKV_OK);
    for (int i = 0; i < 2 * DIM; i++)
        CHECK(fabsf(output[i] - 32.0f / 24.0f) < 1e-6f);
    CHECK(fabsf(lse[0] - logf(24.0f)) < 1e-6f);

    tensors.output.elements = 2 * DIM - 1;
    CHECK(ferrokv_dense_run(dense, NULL, &tensors) == FERROKV_ARGUMENT);
    CHECK(strstr(ferrokv_last_error(), "output has 127 elements, and 128 are needed") != NULL);
    tensors.output.elements = 2 * DIM;
    tensors.keys.dtype = FERROKV_BF16;
    CHECK(ferrokv_dense_run(dense, NULL, &tensors) == FERROKV_ARGUMENT);
    CHECK(strstr(ferrokv_last_error(), "keys is of bfloat16; give it in float16") != NULL);
    tensors.keys.dtype = FERROKV_F16;
    table[1] = 2;
    CHECK(ferrokv_dense_run(dense, NULL, &tensors) == FERROKV_ARGUMENT);
    table[1] = 0;
    lengths[0] = 33;
    CHECK(ferrokv_dense_run(dense, NULL, &tensors) == FERROKV_ARGUMENT);
    lengths[0] = 24;
    tensors.lse.data = NULL;
    CHECK(ferrokv_dense_run(dense, NULL, &tensors) == FERROKV_OK);
    ferrokv_dense_destroy(dense);
}

static void codes(const ferrokv_device *device) {
    ferrokv_int8 *int8 = NULL;
    CHECK(ferrokv_int8_create(device, FERROKV_F32, 3, 5, "narrow", &int8) == FERROKV_ARGUMENT && int8 == NULL);
    CHECK(ferrokv_int8_create(device, FERROKV_F32, 3, 5, NULL, &int8) == FERROKV_OK);
    CHECK(ferrokv_int8_scales(int8) == 5);
    float *matrix = memory(15 * 4), *scales = memory(5 * 4), *back = memory(15 * 4);
    int8_t *code = memory(15);
    for (int i = 0; i < 15; i++)
        matrix[i] = (float)(i % 7) - 3.0f;
    ferrokv_tensor m = tensor(matrix, 15, FERROKV_F32), c = tensor(code, 15, FERROKV_I8);
    ferrokv_tensor s = tensor(scales, 5, FERROKV_F32), b = tensor(back, 15, FERROKV_F32);
    CHECK(ferrokv_int8_quantize(int8, NULL, &m, &c, &s) == FERROKV_OK);
    CHECK(ferrokv_int8_dequantize(int8, NULL, &c, &s, &b) == FERROKV_OK);
    for (int i = 0; i < 15; i++)
        CHECK(fabsf(back[i] - matrix[i]) <= scales[i % 5] * 0.50002f);
    ferrokv_int8_destroy(int8);
}

static void step(const ferrokv_device *device) {
    ferrokv_cache *cache = NULL;
    ferrokv_cache_extents extents = {1, 2, 1, DIM, 32, 1};
    CHECK(ferrokv_cache_create(device, "int8-int5", &extents, &cache) == FERROKV_ARGUMENT);
    CHECK(strstr(ferrokv_last_error(), "there is no KV scheme 'int8-int5'") != NULL);
    CHECK(ferrokv_cache_create(device, "dense", &extents, &cache) == FERROKV_OK);
    uint16_t *keys = memory(DIM * 2), *values = memory(DIM * 2), *queries = memory(2 * DIM * 2);
    float *output = memory(2 * DIM * 4);
    int32_t *positions = memory(4);
    for (int i = 0; i < DIM; i++)
        values[i] = TWO;
    ferrokv_tensor p = tensor(positions, 1, FERROKV_I32), k = tensor(keys, DIM, FERROKV_F16);
    ferrokv_tensor v = tensor(values, DIM, FERROKV_F16), q = tensor(queries, 2 * DIM, FERROKV_F16);
    ferrokv_tensor o = tensor(output, 2 * DIM, FERROKV_F32);
    CHECK(ferrokv_cache_append(cache, NULL, 0, &p, &k, &v) == FERROKV_STATE);
    for (int token = 0; token < 3; token++) {
        positions[0] = token;
        CHECK(ferrokv_cache_begin_step(cache, NULL) == FERROKV_OK);
        CHECK(ferrokv_cache_append(cache, NULL, 0, &p, &k, &v) == FERROKV_OK);
        CHECK(ferrokv_cache_attend(cache, NULL, 0, &q, &o) == FERROKV_OK);
        CHECK(ferrokv_cache_commit(cache) == FERROKV_OK);
        CHECK(output[0] == 2.0f && output[2 * DIM - 1] == 2.0f);
    }
    CHECK(ferrokv_cache_tokens(cache, 0) == 3 && ferrokv_cache_tokens(cache, 1) == -1);
    uint32_t sequence = 7;
    CHECK(ferrokv_cache_join(cache, NULL, &sequence) == FERROKV_STATE);
    CHECK(ferrokv_cache_leave(cache, NULL, 0) == FERROKV_OK);
    CHECK(ferrokv_cache_join(cache, NULL, &sequence) == FERROKV_OK && sequence == 0);
    ferrokv_cache_destroy(cache);
}

/* What dlpack.h declares. */
typedef struct {
    void *data;
    struct {
        int32_t device_type, device_id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

static void handed_over(const ferrokv_device *device) {
    float *data = memory(48);
    int64_t shape[2] = {2, 3}, strides[2] = {3, 1};
    dl_tensor given = {data, {1, 0}, 2, {2, 32, 1}, shape, NULL, 16};
    ferrokv_tensor found = {0};
    CHECK(ferrokv_tensor_from_dlpack(device, &given, &found) == FERROKV_OK);
    CHECK(found.data == data + 4 && found.elements == 6 && found.dtype == FERROKV_F32);
    given.strides = strides;
    CHECK(ferrokv_tensor_from_dlpack(device, &given, &found) == FERROKV_OK);
    strides[0] = 4;
    CHECK(ferrokv_tensor_from_dlpack(device, &given, &found) == FERROKV_ARGUMENT);
    CHECK(strstr(ferrokv_last_error(), "strides [4, 1]") != NULL);
    given.strides = NULL;
    given.dtype.bits = 64;
    CHECK(ferrokv_tensor_from_dlpack(device, &given, &found) == FERROKV_ARGUMENT);
    CHECK(strstr(ferrokv_last_error(), "is of float64; give it in one of float32") != NULL);
    given.dtype.bits = 32;
    given.device.device_type = 2;
    CHECK(ferrokv_tensor_from_dlpack(device, &given, &found) == FERROKV_ARGUMENT);
    CHECK(strstr(ferrokv_last_error(), "is on GPU 0") != NULL);
    CHECK(ferrokv_tensor_from_dlpack(device, NULL, &found) == FERROKV_ARGUMENT);
    CHECK(ferrokv_tensor_from_dlpack(device, &given, NULL) == FERROKV_ARGUMENT);
}

int main(void) {
    ferrokv_device *device = NULL;
    CHECK(ferrokv_abi() == FERROKV_ABI);
    CHECK(strlen(ferrokv_version()) >= 5 && strstr(ferrokv_schemes(), "certified") != NULL);
    CHECK(ferrokv_device_open_cpu(NULL) == FERROKV_ARGUMENT);
    CHECK(ferrokv_device_open_cpu(&device) == FERROKV_OK);
    CHECK(strstr(ferrokv_device_name(device), "CPU") != NULL);
    attention(device);
    codes(device);
    step(device);
    handed_over(device);
    ferrokv_device_close(device);
    ferrokv_device_close(NULL);
    return 0;
}
