/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Opens GPUs, and calls CUDA's driver for Python and for the engine.
 *
 * While a thread captures a graph in the global mode (torch's default), CUDA rejects calls of other
 * threads that could be unsafe in that graph (allocation, registration, queries), and the capture
 * fails, too. No call here is part of such a graph, so all are made in the relaxed mode.
 */
#include "cuda/driver.h"

#ifndef BL_SIM

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BL_CUDA_RELAXED = 2,            /* CU_STREAM_CAPTURE_MODE_RELAXED */
    BL_CUDA_NON_BLOCKING = 1,       /* CU_STREAM_NON_BLOCKING */
    BL_CUDA_MAJOR = 75,             /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR */
    BL_CUDA_MINOR = 76
};

int bl_cuda_enter(const bl_cuda *cuda, bl_cuda_scope *scope)
{
    int result = cuda->api.cuCtxPushCurrent(cuda->context);
    scope->mode = BL_CUDA_RELAXED;
    if (result == 0)
        cuda->api.cuThreadExchangeStreamCaptureMode(&scope->mode);
    return bl_cuda_status(result);
}

void bl_cuda_leave(const bl_cuda *cuda, bl_cuda_scope *scope)
{
    uint64_t context;
    cuda->api.cuThreadExchangeStreamCaptureMode(&scope->mode);
    cuda->api.cuCtxPopCurrent(&context);
}

/* Find all functions. Returns the name of one that the library lacks, or NULL. */
static const char *bl_cuda_find(void *library, bl_cuda_api *api)
{
#define BL_CUDA_FIND(FUNCTION, SYMBOL, PARAMETERS)                                                 \
    *(void **)&api->FUNCTION = dlsym(library, SYMBOL);                                             \
    if (api->FUNCTION == NULL)                                                                     \
        return SYMBOL;
    BL_CUDA_FUNCTIONS(BL_CUDA_FIND)
    return NULL;
}

static int bl_cuda_open_device(bl_cuda *cuda, uint32_t number, int *count)
{
    const bl_cuda_api *api = &cuda->api;
    bl_cuda_facts *facts = &cuda->facts;
    int device, result = api->cuInit(0);
    if (result == 0)
        result = api->cuDeviceGetCount(count);
    if (result != 0 || number >= (uint32_t)*count)
        return result ? bl_cuda_status(result) : -ENODEV;
    if ((result = api->cuDeviceGet(&device, (int)number)) == 0 &&
        (result = api->cuDeviceGetName(facts->name, sizeof facts->name, device)) == 0 &&
        (result = api->cuDeviceGetPCIBusId(facts->bus, sizeof facts->bus, device)) == 0 &&
        (result = api->cuDeviceGetAttribute(&facts->major, BL_CUDA_MAJOR, device)) == 0 &&
        (result = api->cuDeviceGetAttribute(&facts->minor, BL_CUDA_MINOR, device)) == 0 &&
        (result = api->cuDriverGetVersion(&facts->version)) == 0)
        result = api->cuDevicePrimaryCtxRetain(&cuda->context, device);
    return bl_cuda_status(result);
}

int bl_cuda_open(const char *library, uint32_t number, char *fault, uint64_t fault_size,
                 bl_cuda **out)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        snprintf(fault, fault_size, "%s", dlerror());
        return -ENOENT;
    }
    bl_cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL)
        return -ENOMEM;
    int status = -ENOSYS, count = 0;
    const char *lacks = bl_cuda_find(handle, &cuda->api);
    if (lacks != NULL)
        snprintf(fault, fault_size, "%s has no %s: the driver is too old", library, lacks);
    else
        status = bl_cuda_open_device(cuda, number, &count);
    if (status == -ENODEV)
        snprintf(fault, fault_size, "there is no GPU %u here; there are %d", number, count);
    else if (status < 0 && lacks == NULL)
        snprintf(fault, fault_size, "there is no usable GPU here: %s", bl_cuda_text(cuda, status));
    if (status == 0)
        *out = cuda;
    else
        free(cuda);
    return status;
}

const bl_cuda_facts *bl_cuda_facts_of(const bl_cuda *cuda) { return &cuda->facts; }

const char *bl_cuda_text(const bl_cuda *cuda, int64_t status)
{
    const char *text = NULL;
    if (status > -BL_CUDA_STATUS)
        return NULL;
    cuda->api.cuGetErrorString((int)(-status - BL_CUDA_STATUS), &text);
    return text ? text : "unknown error";
}

/* Upload the tables of checksums, on a stream of its own: a capture must not see it. */
static int bl_cuda_upload(bl_cuda *cuda, uint64_t stream)
{
    const bl_cuda_api *api = &cuda->api;
    uint32_t words[BL_SPAN_TABLE_WORDS];
    int result = 0;
    for (int half = 0; result == 0 && half < 2; half++) {
        bl_spans_tables(half ? 16 : 32, words);
        if ((result = api->cuMemAlloc(&cuda->tables[half], sizeof words)) == 0 &&
            (result = api->cuMemcpyAsync(cuda->tables[half], (uint64_t)(uintptr_t)words,
                                         sizeof words, stream)) == 0)
            result = api->cuStreamSynchronize(stream);
    }
    return result;
}

int bl_cuda_load(bl_cuda *cuda, const void *cubin)
{
    static const char *const names[BL_CUDA_KERNELS] = {
        "bl_gather",  "bl_gather_sum",  "bl_gather_half",  "bl_gather_half_sum",
        "bl_scatter", "bl_scatter_sum", "bl_scatter_half", "bl_scatter_half_sum",
    };
    const bl_cuda_api *api = &cuda->api;
    bl_cuda_scope scope;
    uint64_t module, stream;
    int status = bl_cuda_enter(cuda, &scope);
    if (status < 0)
        return status;
    int result = api->cuModuleLoadData(&module, cubin);
    for (int i = 0; result == 0 && i < BL_CUDA_KERNELS; i++)
        result = api->cuModuleGetFunction(&cuda->kernels[i], module, names[i]);
    if (result == 0)
        result = api->cuStreamCreateWithPriority(&stream, BL_CUDA_NON_BLOCKING, 0);
    if (result == 0) {
        result = bl_cuda_upload(cuda, stream);
        api->cuStreamDestroy(stream);
    }
    bl_cuda_leave(cuda, &scope);
    return bl_cuda_status(result);
}

/* Define a function that makes one call. */
#define BL_CUDA_CALL(NAME, PARAMETERS, CALL)                                                       \
    int NAME PARAMETERS                                                                            \
    {                                                                                              \
        bl_cuda_scope scope;                                                                       \
        int status = bl_cuda_enter(cuda, &scope);                                                  \
        if (status < 0)                                                                            \
            return status;                                                                         \
        status = bl_cuda_status(cuda->api.CALL);                                                   \
        bl_cuda_leave(cuda, &scope);                                                               \
        return status;                                                                             \
    }

BL_CUDA_CALL(bl_cuda_allocate, (bl_cuda *cuda, uint64_t size, uint64_t *address),
             cuMemAlloc(address, size))
BL_CUDA_CALL(bl_cuda_free, (bl_cuda *cuda, uint64_t address), cuMemFree(address))
BL_CUDA_CALL(bl_cuda_unpin, (bl_cuda *cuda, void *host), cuMemFreeHost(host))
BL_CUDA_CALL(bl_cuda_unregister, (bl_cuda *cuda, void *host), cuMemHostUnregister(host))
BL_CUDA_CALL(bl_cuda_memcpy,
             (bl_cuda *cuda, uint64_t target, uint64_t source, uint64_t size, uint64_t stream),
             cuMemcpyAsync(target, source, size, stream))
BL_CUDA_CALL(bl_cuda_stream, (bl_cuda *cuda, int32_t priority, uint64_t *stream),
             cuStreamCreateWithPriority(stream, BL_CUDA_NON_BLOCKING, priority))
BL_CUDA_CALL(bl_cuda_end_stream, (bl_cuda *cuda, uint64_t stream), cuStreamDestroy(stream))
BL_CUDA_CALL(bl_cuda_capturing, (bl_cuda *cuda, uint64_t stream, int32_t *status_out),
             cuStreamIsCapturing(stream, status_out))
BL_CUDA_CALL(bl_cuda_event, (bl_cuda *cuda, uint64_t *event),
             cuEventCreate(event, BL_CUDA_EVENT_SLEEP))
BL_CUDA_CALL(bl_cuda_free_event, (bl_cuda *cuda, uint64_t event), cuEventDestroy(event))
BL_CUDA_CALL(bl_cuda_record, (bl_cuda *cuda, uint64_t event, uint64_t stream),
             cuEventRecord(event, stream))
BL_CUDA_CALL(bl_cuda_follow, (bl_cuda *cuda, uint64_t stream, uint64_t event),
             cuStreamWaitEvent(stream, event, 0))
BL_CUDA_CALL(bl_cuda_wait, (bl_cuda *cuda, uint64_t event), cuEventSynchronize(event))
static BL_CUDA_CALL(bl_cuda_time, (bl_cuda *cuda, float *ms, uint64_t first, uint64_t last),
                    cuEventElapsedTime(ms, first, last))
static BL_CUDA_CALL(bl_cuda_ended, (bl_cuda *cuda, uint64_t event), cuEventQuery(event))
static BL_CUDA_CALL(bl_cuda_host, (bl_cuda *cuda, uint64_t size, void **host),
                    cuMemHostAlloc(host, size, BL_CUDA_HOST_MAPPED))
static BL_CUDA_CALL(bl_cuda_page_lock, (bl_cuda *cuda, void *host, uint64_t size),
                    cuMemHostRegister(host, size, BL_CUDA_HOST_MAPPED))
static BL_CUDA_CALL(bl_cuda_address, (bl_cuda *cuda, void *host, uint64_t *address),
                    cuMemHostGetDevicePointer(address, host, 0))

int bl_cuda_query(bl_cuda *cuda, uint64_t event)
{
    int status = bl_cuda_ended(cuda, event);
    return status == bl_cuda_status(BL_CUDA_NOT_READY) ? 0 : status < 0 ? status : 1;
}

int bl_cuda_elapsed(bl_cuda *cuda, double *ms, uint64_t first, uint64_t last)
{
    float found = 0;
    int status = bl_cuda_time(cuda, &found, first, last);
    *ms = (double)found;
    return status;
}

int bl_cuda_pin(bl_cuda *cuda, uint64_t size, void **host, uint64_t *address)
{
    int status = bl_cuda_host(cuda, size, host);
    if (status == 0 && (status = bl_cuda_address(cuda, *host, address)) < 0)
        bl_cuda_unpin(cuda, *host);
    return status;
}

int bl_cuda_register(bl_cuda *cuda, void *host, uint64_t size, uint64_t *address)
{
    int status = bl_cuda_page_lock(cuda, host, size);
    if (status == 0 && (status = bl_cuda_address(cuda, host, address)) < 0)
        bl_cuda_unregister(cuda, host);
    return status;
}

#endif
