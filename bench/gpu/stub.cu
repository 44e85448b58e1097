/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A stand-in for libcuda and NVRTC on machines without a GPU. It runs the kernels' source, compiled
 * for this CPU, on threads: each stream has one, so work is as asynchronous as on a GPU. GPU memory
 * is memory of this process. Pinned and registered memory is mapped a second time: as on a GPU, it
 * has another address there, and memory that is not registered cannot be reached. Its speed does
 * not represent a GPU.
 *
 * Functions named stub_ are for tests and benchmarks (stub.py). A hook sees every call of the
 * driver on a device first, and may make it fail. A null device moves nothing, and its kernels take
 * time.
 */
#include <errno.h>
#include <sys/mman.h>
#include <time.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kv_copy.cu"

#define API extern "C" __attribute__((visibility("default")))

enum {
    OK = 0, INVALID = 1, NO_MEMORY = 2, BAD_IMAGE = 200, BAD_CONTEXT = 201, BAD_HANDLE = 400,
    NOT_FOUND = 500, NOT_READY = 600, REGISTERED = 712, NOT_REGISTERED = 713, FAILED = 719,
    CAPTURING = 900, RELAXED = 2
};

typedef std::function<int(int failed)> Work; /* returns the stream's error */
typedef int (*Hook)(const char *function, uint64_t first, uint64_t second);

/* One recording of an event, which is reached when its stream has executed the work before it. */
struct Mark {
    bool reached = false;
    int error = 0;
    int64_t at_ns = 0;          /* of a null device: when it is reached */
};

struct Device;

struct Stream {
    Device *device;
    std::deque<Work> work;
    std::vector<Work> *graph = nullptr;
    bool ending = false;
};

typedef std::map<void *, std::pair<void *, size_t>> Aliases;

struct Device {
    int index = 0;
    std::mutex lock;
    std::condition_variable changed;
    bool gate = true;           /* closed: kernels do not start */
    bool capturing_elsewhere = false;
    uint64_t bytes_per_s = 0;   /* of a null device */
    uint64_t span_size = 0;     /* of its spans */
    int64_t free_ns = 0;
    Hook hook = nullptr;
    Stream *legacy = nullptr;
    std::set<uint64_t> streams, memory;
    std::map<uint64_t, std::shared_ptr<Mark>> events;
    Aliases pinned, registered;
    std::vector<const char *> launches;
};

static std::mutex devices_lock;
static std::vector<Device *> devices; /* never freed: threads outlive main() */
static thread_local std::vector<uint64_t> contexts;
static thread_local int capture_mode;
static std::string compile_error;

static int64_t now_ns()
{
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void work_off(Stream *stream)
{
    Device *device = stream->device;
    int failed = 0;
    std::unique_lock<std::mutex> held(device->lock);
    for (;;) {
        device->changed.wait(held, [&] { return !stream->work.empty() || stream->ending; });
        if (stream->work.empty())
            break;
        Work work = std::move(stream->work.front());
        stream->work.pop_front();
        held.unlock();
        failed = work(failed);
        held.lock();
    }
    delete stream;
}

static Stream *make_stream(Device *device)
{
    Stream *stream = new Stream{device, {}, nullptr, false};
    std::thread(work_off, stream).detach();
    return stream;
}

static Device *device_at(int index)
{
    std::lock_guard<std::mutex> held(devices_lock);
    while ((int)devices.size() <= index) {
        Device *device = new Device;
        device->index = (int)devices.size();
        device->legacy = make_stream(device);
        devices.push_back(device);
    }
    return devices[index];
}

static Device *current() { return contexts.empty() ? nullptr : device_at(contexts.back() - 1); }

/* Every function of a device starts with this. */
#define BEGIN(NAME, FIRST, SECOND)                                                                 \
    Device *device = current();                                                                    \
    if (!device)                                                                                   \
        return BAD_CONTEXT;                                                                        \
    if (Hook hook = device->hook)                                                                  \
        if (int result = hook(NAME, (uint64_t)(FIRST), (uint64_t)(SECOND)))                        \
            return result;

/* CUDA rejects these calls while another thread captures in the global mode. */
#define UNSAFE                                                                                     \
    if (device->capturing_elsewhere && capture_mode != RELAXED)                                    \
        return CAPTURING;

static Stream *stream_of(Device *device, uint64_t handle)
{
    if (handle == 0)
        return device->legacy;
    return device->streams.count(handle) ? (Stream *)handle : nullptr;
}

#define STREAM(HANDLE)                                                                             \
    std::unique_lock<std::mutex> held(device->lock);                                               \
    Stream *stream = stream_of(device, HANDLE);                                                    \
    if (!stream)                                                                                   \
        return BAD_HANDLE;

static void put(Stream *stream, Work work) /* with the device's lock */
{
    if (stream->graph)
        stream->graph->push_back(std::move(work));
    else
        stream->work.push_back(std::move(work));
    stream->device->changed.notify_all();
}

static void put_mark(Stream *stream, std::shared_ptr<Mark> mark)
{
    Device *device = stream->device;
    mark->at_ns = device->free_ns;
    if (device->bytes_per_s)
        return;
    put(stream, [device, mark](int failed) {
        std::lock_guard<std::mutex> held(device->lock);
        mark->reached = true, mark->error = failed, mark->at_ns = now_ns();
        device->changed.notify_all();
        return failed;
    });
}

static int wait_mark(Device *device, std::unique_lock<std::mutex> &held, std::shared_ptr<Mark> mark)
{
    if (device->bytes_per_s) {
        int64_t left = mark->at_ns - now_ns();
        timespec nap = {left / 1000000000, left % 1000000000};
        held.unlock();
        if (left > 0)
            nanosleep(&nap, nullptr);
        return OK;
    }
    device->changed.wait(held, [&] { return mark->reached; });
    return mark->error;
}

/* ---- Devices, contexts and modules */

API int cuInit(unsigned) { return OK; }
API int cuDriverGetVersion(int *version) { return *version = 12080, OK; }

API int cuGetErrorString(int result, const char **text)
{
    static const std::map<int, const char *> texts = {
        {INVALID, "invalid argument"}, {NO_MEMORY, "out of memory"},
        {BAD_IMAGE, "device kernel image is invalid"}, {BAD_CONTEXT, "invalid device context"},
        {BAD_HANDLE, "invalid resource handle"}, {NOT_FOUND, "named symbol not found"},
        {NOT_READY, "device not ready"}, {FAILED, "unspecified launch failure"},
        {REGISTERED, "part or all of the requested memory range is already mapped"},
        {NOT_REGISTERED, "pointer does not correspond to a registered memory region"},
        {CAPTURING, "operation not permitted when stream is capturing"}, {999, "unknown error"},
    };
    auto found = texts.find(result);
    *text = found == texts.end() ? nullptr : found->second;
    return found == texts.end() ? INVALID : OK;
}

API int cuDeviceGetCount(int *count)
{
    device_at(0);
    std::lock_guard<std::mutex> held(devices_lock);
    return *count = (int)devices.size(), OK;
}

API int cuDeviceGet(int *device, int index) { return *device = device_at(index)->index, OK; }
API int cuDeviceGetName(char *name, int size, int) { return snprintf(name, size, "Stand-in"), OK; }

API int cuDeviceGetPCIBusId(char *name, int size, int device)
{
    return snprintf(name, size, "%04x:00:00.0", device), OK;
}

API int cuDeviceGetAttribute(int *value, int attribute, int)
{
    return *value = attribute == 75 ? 9 : 0, OK; /* compute capability 9.0 */
}

API int cuDevicePrimaryCtxRetain(uint64_t *context, int device)
{
    return *context = (uint64_t)device + 1, OK;
}

API int cuCtxPushCurrent_v2(uint64_t context) { return contexts.push_back(context), OK; }

API int cuCtxPopCurrent_v2(uint64_t *context)
{
    if (contexts.empty())
        return BAD_CONTEXT;
    *context = contexts.back();
    return contexts.pop_back(), OK;
}

API int cuThreadExchangeStreamCaptureMode(int *mode) { return std::swap(capture_mode, *mode), OK; }

static const char IMAGE[] = "stand-in";

API int cuModuleLoadData(uint64_t *module, const void *image)
{
    BEGIN("cuModuleLoadData", image, 0)
    UNSAFE
    return *module = 1, strncmp((const char *)image, IMAGE, sizeof IMAGE) ? BAD_IMAGE : OK;
}

struct Kernel {
    const char *name;
    void (*run)(const bl_job *job, bl_grid grid, bl_trace *trace);
};

#define KERNEL(NAME) {#NAME, NAME}

static const Kernel kernels[] = {
    KERNEL(bl_gather),       KERNEL(bl_gather_sum),       KERNEL(bl_gather_half),
    KERNEL(bl_gather_half_sum), KERNEL(bl_scatter),       KERNEL(bl_scatter_sum),
    KERNEL(bl_scatter_half), KERNEL(bl_scatter_half_sum),
};

API int cuModuleGetFunction(uint64_t *function, uint64_t, const char *name)
{
    for (const Kernel &kernel : kernels)
        if (!strcmp(kernel.name, name))
            return *function = (uint64_t)&kernel, OK;
    return NOT_FOUND;
}

/* ---- Memory */

static void *map(size_t size)
{
    void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

/* Map the shared pages of a range a second time; of a null device, nothing is accessed there. */
static int add_alias(Device *device, Aliases &aliases, void *host, size_t size)
{
    void *alias = device->bytes_per_s ? host : mremap(host, 0, size, MREMAP_MAYMOVE);
    if (alias == MAP_FAILED)
        return NO_MEMORY;
    return aliases[host] = {alias, size}, OK;
}

static int end_alias(Aliases &aliases, void *host, size_t *size)
{
    auto found = aliases.find(host);
    if (found == aliases.end())
        return NOT_REGISTERED;
    *size = found->second.second;
    if (found->second.first != host)
        munmap(found->second.first, *size);
    return aliases.erase(found), OK;
}

API int cuMemAlloc_v2(uint64_t *address, size_t size)
{
    BEGIN("cuMemAlloc", size, 0)
    UNSAFE
    std::lock_guard<std::mutex> held(device->lock);
    if (!(*address = (uint64_t)malloc(device->bytes_per_s ? 1 : size)))
        return NO_MEMORY;
    return device->memory.insert(*address), OK;
}

API int cuMemFree_v2(uint64_t address)
{
    BEGIN("cuMemFree", address, 0)
    UNSAFE
    std::lock_guard<std::mutex> held(device->lock);
    if (!device->memory.erase(address))
        return INVALID;
    return free((void *)address), OK;
}

API int cuMemHostAlloc(void **host, size_t size, unsigned)
{
    BEGIN("cuMemHostAlloc", size, 0)
    UNSAFE
    std::lock_guard<std::mutex> held(device->lock);
    *host = map(size);
    return *host ? add_alias(device, device->pinned, *host, size) : NO_MEMORY;
}

API int cuMemFreeHost(void *host)
{
    BEGIN("cuMemFreeHost", host, 0)
    UNSAFE
    std::lock_guard<std::mutex> held(device->lock);
    size_t size;
    if (int result = end_alias(device->pinned, host, &size))
        return result;
    return munmap(host, size), OK;
}

API int cuMemHostRegister_v2(void *host, size_t size, unsigned)
{
    BEGIN("cuMemHostRegister", host, size)
    UNSAFE
    std::lock_guard<std::mutex> held(device->lock);
    return device->registered.count(host) ? REGISTERED
                                          : add_alias(device, device->registered, host, size);
}

API int cuMemHostUnregister(void *host)
{
    BEGIN("cuMemHostUnregister", host, 0)
    UNSAFE
    std::lock_guard<std::mutex> held(device->lock);
    size_t size;
    return end_alias(device->registered, host, &size);
}

API int cuMemHostGetDevicePointer_v2(uint64_t *address, void *host, unsigned)
{
    BEGIN("cuMemHostGetDevicePointer", host, 0)
    std::lock_guard<std::mutex> held(device->lock);
    for (const Aliases *aliases : {&device->pinned, &device->registered}) {
        auto found = aliases->find(host);
        if (found != aliases->end())
            return *address = (uint64_t)found->second.first, OK;
    }
    return INVALID;
}

static int enqueue_copy(Device *device, uint64_t target, uint64_t from, size_t size,
                        uint64_t handle)
{
    STREAM(handle)
    if (!device->bytes_per_s)
        put(stream, [=](int failed) {
            return failed ? failed : (memmove((void *)target, (void *)from, size), OK);
        });
    return OK;
}

API int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, uint64_t handle)
{
    BEGIN("cuMemcpyAsync", target, source)
    return enqueue_copy(device, target, source, size, handle);
}

/* With the nine arguments of CUDA 12.8, whose symbol later drivers keep. */
API int cuMemcpyBatchAsync(const uint64_t *targets, const uint64_t *sources, const size_t *sizes,
                           size_t count, const int *attributes, const size_t *first, size_t kinds,
                           size_t *, uint64_t handle)
{
    BEGIN("cuMemcpyBatchAsync", count, 0)
    if (attributes[0] != 1 || first[0] != 0 || kinds != 1 || handle == 0)
        return INVALID;         /* the default stream is refused */
    for (size_t i = 0; i < count; i++)
        if (int result = enqueue_copy(device, targets[i], sources[i], sizes[i], handle))
            return result;
    return OK;
}

/* ---- Streams, events and launches */

API int cuStreamCreateWithPriority(uint64_t *handle, unsigned, int priority)
{
    BEGIN("cuStreamCreateWithPriority", priority, 0)
    std::lock_guard<std::mutex> held(device->lock);
    *handle = (uint64_t)make_stream(device);
    return device->streams.insert(*handle), OK;
}

API int cuStreamDestroy_v2(uint64_t handle)
{
    BEGIN("cuStreamDestroy", handle, 0)
    STREAM(handle)
    device->streams.erase(handle);
    stream->ending = true;
    return device->changed.notify_all(), OK;
}

API int cuStreamIsCapturing(uint64_t handle, int *status)
{
    BEGIN("cuStreamIsCapturing", handle, 0)
    STREAM(handle)
    return *status = stream->graph != nullptr, OK;
}

API int cuStreamWaitEvent(uint64_t handle, uint64_t event, unsigned)
{
    BEGIN("cuStreamWaitEvent", handle, event)
    STREAM(handle)
    std::shared_ptr<Mark> mark = device->events.at(event);
    if (!device->bytes_per_s)
        put(stream, [device, mark](int failed) {
            std::unique_lock<std::mutex> inner(device->lock);
            device->changed.wait(inner, [&] { return mark->reached; });
            return failed ? failed : mark->error;
        });
    return OK;
}

API int cuStreamSynchronize(uint64_t handle)
{
    BEGIN("cuStreamSynchronize", handle, 0)
    UNSAFE
    STREAM(handle)
    auto mark = std::make_shared<Mark>();
    put_mark(stream, mark);
    return wait_mark(device, held, mark);
}

API int cuEventCreate(uint64_t *event, unsigned flags)
{
    BEGIN("cuEventCreate", flags, 0)
    static uint64_t last;
    std::lock_guard<std::mutex> held(device->lock);
    auto mark = std::make_shared<Mark>();
    mark->reached = true;       /* until it is recorded */
    return device->events[*event = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED)] = mark, OK;
}

API int cuEventDestroy_v2(uint64_t event)
{
    BEGIN("cuEventDestroy", event, 0)
    std::lock_guard<std::mutex> held(device->lock);
    return device->events.erase(event) ? OK : BAD_HANDLE;
}

API int cuEventRecord(uint64_t event, uint64_t handle)
{
    BEGIN("cuEventRecord", event, handle)
    STREAM(handle)
    if (!device->events.count(event))
        return BAD_HANDLE;
    if (stream->graph)
        return CAPTURING;
    put_mark(stream, device->events[event] = std::make_shared<Mark>());
    return OK;
}

API int cuEventQuery(uint64_t event)
{
    BEGIN("cuEventQuery", event, 0)
    UNSAFE
    std::lock_guard<std::mutex> held(device->lock);
    auto found = device->events.find(event);
    if (found == device->events.end())
        return BAD_HANDLE;
    const Mark &mark = *found->second;
    if (device->bytes_per_s)
        return now_ns() < mark.at_ns ? NOT_READY : OK;
    return mark.reached ? mark.error : NOT_READY;
}

API int cuEventSynchronize(uint64_t event)
{
    BEGIN("cuEventSynchronize", event, 0)
    UNSAFE
    std::unique_lock<std::mutex> held(device->lock);
    auto found = device->events.find(event);
    return found == device->events.end() ? BAD_HANDLE : wait_mark(device, held, found->second);
}

API int cuEventElapsedTime(float *ms, uint64_t first, uint64_t last)
{
    BEGIN("cuEventElapsedTime", first, last)
    std::lock_guard<std::mutex> held(device->lock);
    *ms = (float)(device->events.at(last)->at_ns - device->events.at(first)->at_ns) / 1e6f;
    return OK;
}

API int cuLaunchHostFunc(uint64_t handle, void (*function)(void *), void *context)
{
    BEGIN("cuLaunchHostFunc", handle, 0)
    STREAM(handle)
    put(stream, [=](int failed) { return failed ? failed : (function(context), OK); });
    return OK;
}

/* A null device's kernel ends after all kernels before it, and computes no checksums. */
static void launch_null(Device *device, const bl_job &job)
{
    uint64_t size = job.count * device->span_size;
    memset(job.sums, 0, job.count * sizeof *job.sums);
    device->free_ns = std::max(device->free_ns, now_ns()) +
                      (int64_t)((__int128)size * 1000000000 / device->bytes_per_s);
}

API int cuLaunchKernel(uint64_t function, unsigned grid, unsigned, unsigned, unsigned block,
                       unsigned, unsigned, unsigned, uint64_t handle, void **arguments, void **)
{
    const Kernel *kernel = (const Kernel *)function;
    bl_job job = *(const bl_job *)arguments[0];
    BEGIN("cuLaunchKernel", kernel->name, handle)
    STREAM(handle)
    if (device->bytes_per_s)
        return launch_null(device, job), OK;
    device->launches.push_back(kernel->name);
    if (!stream->graph)
        put(stream, [device](int failed) {
            std::unique_lock<std::mutex> inner(device->lock);
            device->changed.wait(inner, [&] { return device->gate; });
            return failed;
        });
    put(stream, [=](int failed) {
        if (!failed)
            kernel->run(&job, bl_grid{grid, block}, nullptr);
        return failed;
    });
    return OK;
}

/* ---- NVRTC */

API int nvrtcVersion(int *major, int *minor) { return *major = 0, *minor = 1, OK; }

API int nvrtcCreateProgram(void **program, const char *, const char *, int, void *, void *)
{
    return *program = (void *)IMAGE, OK;
}

API int nvrtcCompileProgram(void *, int, const char *const *)
{
    return compile_error.empty() ? OK : 6; /* NVRTC_ERROR_COMPILATION */
}

API int nvrtcGetProgramLogSize(void *, size_t *size)
{
    return *size = compile_error.size() + 1, OK;
}

API int nvrtcGetProgramLog(void *, char *log) { return strcpy(log, compile_error.c_str()), OK; }
API int nvrtcGetCUBINSize(void *, size_t *size) { return *size = sizeof IMAGE, OK; }
API int nvrtcGetCUBIN(void *, char *cubin) { return memcpy(cubin, IMAGE, sizeof IMAGE), OK; }
API int nvrtcDestroyProgram(void **) { return OK; }

/* ---- For tests and benchmarks */

/* Make another device. Returns its number. */
API int stub_device()
{
    int count;
    cuDeviceGetCount(&count);
    return device_at(count)->index;
}

API void stub_hook(int device, Hook hook) { device_at(device)->hook = hook; }

API void stub_null(int number, uint64_t bytes_per_s, uint64_t span_size)
{
    Device *device = device_at(number);
    device->bytes_per_s = bytes_per_s, device->span_size = span_size;
}

API void stub_gate(int number, int open)
{
    Device *device = device_at(number);
    std::lock_guard<std::mutex> held(device->lock);
    device->gate = open != 0;
    device->changed.notify_all();
}

/* Make later work on a stream fail, as after a kernel's fault. */
API void stub_break(int number, uint64_t handle)
{
    Device *device = device_at(number);
    std::lock_guard<std::mutex> held(device->lock);
    put(stream_of(device, handle), [](int) { return FAILED; });
}

API void stub_capture_elsewhere(int device, int captures)
{
    device_at(device)->capturing_elsewhere = captures != 0;
}

API int stub_launches(int number)
{
    Device *device = device_at(number);
    std::lock_guard<std::mutex> held(device->lock);
    return (int)device->launches.size();
}

API const char *stub_launch(int number, int index)
{
    Device *device = device_at(number);
    std::lock_guard<std::mutex> held(device->lock);
    return device->launches[index];
}

/* Count the events, and the ranges of GPU, pinned and registered memory. */
API void stub_count(int number, uint64_t *counts)
{
    Device *device = device_at(number);
    std::lock_guard<std::mutex> held(device->lock);
    counts[0] = device->events.size(), counts[1] = device->memory.size();
    counts[2] = device->pinned.size(), counts[3] = device->registered.size();
}

API void stub_begin_capture(int number, uint64_t handle)
{
    Device *device = device_at(number);
    std::lock_guard<std::mutex> held(device->lock);
    stream_of(device, handle)->graph = new std::vector<Work>;
}

/* End a capture. Returns the graph. */
API void *stub_end_capture(int number, uint64_t handle)
{
    Device *device = device_at(number);
    std::lock_guard<std::mutex> held(device->lock);
    return std::exchange(stream_of(device, handle)->graph, nullptr);
}

/* Replay a graph on a stream. Returns how many operations it has. */
API int stub_replay(int number, const void *graph, uint64_t handle)
{
    Device *device = device_at(number);
    const std::vector<Work> &works = *(const std::vector<Work> *)graph;
    std::lock_guard<std::mutex> held(device->lock);
    for (const Work &work : works)
        put(stream_of(device, handle), work);
    return (int)works.size();
}

API void stub_compile_error(const char *text) { compile_error = text; }
