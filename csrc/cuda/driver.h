/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The functions of CUDA's driver that Beluga calls, found in libcuda when a GPU is opened: nothing
 * is linked with CUDA, and its headers are not needed. Pointers to CUDA's objects are numbers here.
 * The second name is the one that cuda.h maps to.
 */
#ifndef BL_CUDA_DRIVER_H
#define BL_CUDA_DRIVER_H

#include "api/cuda.h"

#define BL_CUDA_FUNCTIONS(X)                                                                       \
    X(cuInit, "cuInit", (uint32_t))                                                                \
    X(cuDriverGetVersion, "cuDriverGetVersion", (int *))                                           \
    X(cuGetErrorString, "cuGetErrorString", (int, const char **))                                  \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *))                                               \
    X(cuDeviceGet, "cuDeviceGet", (int *, int))                                                    \
    X(cuDeviceGetName, "cuDeviceGetName", (char *, int, int))                                      \
    X(cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId", (char *, int, int))                              \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, int))                             \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (uint64_t *, int))                     \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (uint64_t))                                         \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (uint64_t *))                                         \
    X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int *))             \
    X(cuModuleLoadData, "cuModuleLoadData", (uint64_t *, const void *))                            \
    X(cuModuleGetFunction, "cuModuleGetFunction", (uint64_t *, uint64_t, const char *))            \
    X(cuMemAlloc, "cuMemAlloc_v2", (uint64_t *, size_t))                                           \
    X(cuMemFree, "cuMemFree_v2", (uint64_t))                                                       \
    X(cuMemHostAlloc, "cuMemHostAlloc", (void **, size_t, uint32_t))                               \
    X(cuMemFreeHost, "cuMemFreeHost", (void *))                                                    \
    X(cuMemHostRegister, "cuMemHostRegister_v2", (void *, size_t, uint32_t))                       \
    X(cuMemHostUnregister, "cuMemHostUnregister", (void *))                                        \
    X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (uint64_t *, void *, uint32_t))   \
    X(cuMemcpyAsync, "cuMemcpyAsync", (uint64_t, uint64_t, size_t, uint64_t))                      \
    X(cuStreamCreateWithPriority, "cuStreamCreateWithPriority", (uint64_t *, uint32_t, int))       \
    X(cuStreamDestroy, "cuStreamDestroy_v2", (uint64_t))                                           \
    X(cuStreamIsCapturing, "cuStreamIsCapturing", (uint64_t, int *))                               \
    X(cuStreamWaitEvent, "cuStreamWaitEvent", (uint64_t, uint64_t, uint32_t))                      \
    X(cuStreamSynchronize, "cuStreamSynchronize", (uint64_t))                                      \
    X(cuEventCreate, "cuEventCreate", (uint64_t *, uint32_t))                                      \
    X(cuEventRecord, "cuEventRecord", (uint64_t, uint64_t))                                        \
    X(cuEventQuery, "cuEventQuery", (uint64_t))                                                    \
    X(cuEventSynchronize, "cuEventSynchronize", (uint64_t))                                        \
    X(cuEventElapsedTime, "cuEventElapsedTime", (float *, uint64_t, uint64_t))                     \
    X(cuEventDestroy, "cuEventDestroy_v2", (uint64_t))                                             \
    X(cuLaunchKernel, "cuLaunchKernel",                                                            \
      (uint64_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint64_t,   \
       void **, void **))

#define BL_CUDA_FIELD(FUNCTION, SYMBOL, PARAMETERS) int(*FUNCTION) PARAMETERS;

typedef struct bl_cuda_api {
    BL_CUDA_FUNCTIONS(BL_CUDA_FIELD)
} bl_cuda_api;

struct bl_cuda {
    bl_cuda_api api;
    bl_cuda_facts facts;
    uint64_t context;
    uint64_t kernels[BL_CUDA_KERNELS];
    uint64_t tables[2];         /* GPU addresses: for groups of 32 lanes, and of 16 */
};

enum bl_cuda_flag {
    BL_CUDA_HOST_MAPPED = 1 | 2,    /* portable, mapped; devdax is no I/O memory */
    BL_CUDA_EVENT_SLEEP = 1,        /* a thread that waits sleeps */
    BL_CUDA_EVENT_PLAIN = 1 | 2,    /* and without a time */
    BL_CUDA_NOT_READY = 600
};

static inline int bl_cuda_status(int result) { return result ? -(BL_CUDA_STATUS + result) : 0; }

/* What a thread had before its calls. */
typedef struct bl_cuda_scope {
    int mode;
} bl_cuda_scope;

/* Make the GPU's context current, in a mode in which captures of other threads reject no call. */
int bl_cuda_enter(const bl_cuda *cuda, bl_cuda_scope *scope);
void bl_cuda_leave(const bl_cuda *cuda, bl_cuda_scope *scope);

#endif
