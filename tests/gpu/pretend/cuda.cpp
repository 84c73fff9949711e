// A pretend NVIDIA H200: CUDA's runtime, driver and cuBLAS as torch calls them, to be loaded ahead of the real ones.
//
// Its memory is the host's, copies copy, and kernels do nothing; so what comes out means nothing, but everything around
// it is torch's own: code generation and ptxas, packages, the caching allocator, streams, CUDA graphs. What CUDA forbids
// while a stream is captured is refused as CUDA refuses it, and said on standard error with the word VIOLATION.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#undef cuGetProcAddress

namespace {

struct Graph {
  std::vector<std::function<void()>> work;
};

struct Stream {
  bool capturing = false, broken = false;
  cudaStreamCaptureMode mode{};
  std::thread::id thread;
  unsigned long long capture = 0;
  Graph *graph = nullptr;
};

std::recursive_mutex guard;
using Guard = std::lock_guard<std::recursive_mutex>;
std::set<Stream *> captures;
std::map<char *, size_t> on_device, pinned;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<long> launches{0}, captured{0}, graphs{0}, replays{0};
size_t bytes_now = 0, bytes_most = 0;
constexpr size_t MEMORY = 141ull << 30;

cudaError_t refuse(cudaError_t error, const char *what) {
  fprintf(stderr, "VIOLATION: %s\n", what);
  return last_error = error;
}

Stream *stream_of(cudaStream_t stream) {  // none of the legacy and per-thread default streams
  return reinterpret_cast<size_t>(stream) <= 2 ? nullptr : reinterpret_cast<Stream *>(stream);
}

// Whether a call that may not be made during a capture is made during one that forbids it to this thread.
bool forbidden(const char *what) {
  Guard hold(guard);
  for (Stream *stream : captures) {
    bool own = stream->thread == std::this_thread::get_id();
    bool strict = own ? stream->mode != cudaStreamCaptureModeRelaxed : stream->mode == cudaStreamCaptureModeGlobal;
    if (strict && thread_mode != cudaStreamCaptureModeRelaxed) {
      stream->broken = true;
      refuse(cudaErrorStreamCaptureUnsupported, what);
      return true;
    }
  }
  return false;
}

// Work of a stream: done now, or kept for the graph that is captured.
cudaError_t enqueue(cudaStream_t handle, std::function<void()> work, bool is_kernel = false) {
  Guard hold(guard);
  Stream *stream = stream_of(handle);
  launches += is_kernel;
  if (stream && stream->capturing) {
    captured += is_kernel;
    stream->graph->work.push_back(std::move(work));
    return cudaSuccess;
  }
  for (Stream *other : captures)
    if (other->thread == std::this_thread::get_id())
      fprintf(stderr, "VIOLATION: work on another stream than the one this thread captures\n");
  work();
  return cudaSuccess;
}

cudaError_t launch(cudaStream_t stream) {
  return enqueue(stream, [] {}, true);
}

cudaError_t allocate(std::map<char *, size_t> &place, void **pointer, size_t bytes) {
  Guard hold(guard);
  *pointer = aligned_alloc(512, (bytes + 511) / 512 * 512);
  if (!*pointer) return last_error = cudaErrorMemoryAllocation;
  memset(*pointer, 0, bytes);
  place[static_cast<char *>(*pointer)] = bytes;
  bytes_most = std::max(bytes_most, bytes_now += bytes);
  return cudaSuccess;
}

cudaError_t release(std::map<char *, size_t> &place, void *pointer) {
  Guard hold(guard);
  auto found = place.find(static_cast<char *>(pointer));
  if (found == place.end()) return cudaSuccess;
  bytes_now -= found->second;
  place.erase(found);
  free(pointer);
  return cudaSuccess;
}

bool within(const std::map<char *, size_t> &place, const void *pointer) {
  auto next = place.upper_bound(static_cast<char *>(const_cast<void *>(pointer)));
  if (next == place.begin()) return false;
  --next;
  return pointer < next->first + next->second;
}

int attribute(int which) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrL2CacheSize: return 60 << 20;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth: return 6144;
    case cudaDevAttrUnifiedAddressing: return 1;
    default: return 0;
  }
}

struct Summary {
  ~Summary() {
    if (launches)
      fprintf(stderr, "pretend GPU: %ld kernels launched, %ld captured in %ld graphs, %ld replays, %zu MB at most\n",
              launches.load(), captured.load(), graphs.load(), replays.load(), bytes_most >> 20);
  }
} summary;

}  // namespace

#define CALL extern "C" __attribute__((visibility("default")))
#define CALM(name, ...) \
  CALL cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
#define CALM_DRIVER(name, ...) \
  CALL CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }

// ---- the device ----

CALL cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
CALL cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
CALL cudaError_t cudaSetDevice(int device) { return device ? refuse(cudaErrorInvalidDevice, "no such device") : cudaSuccess; }
CALL cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
CALL cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }
CALL cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int) { return *value = attribute(which), cudaSuccess; }
CALL cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
CALL cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
CALL cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int) { return snprintf(text, size, "0000:00:00.0"), cudaSuccess; }
CALL cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "NVIDIA pretend H200");  // so that no figure of it passes for a real one
  found->major = attribute(cudaDevAttrComputeCapabilityMajor);
  found->totalGlobalMem = MEMORY;
  found->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  found->warpSize = attribute(cudaDevAttrWarpSize);
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  found->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  found->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  found->regsPerMultiprocessor = found->regsPerBlock = 65536;
  found->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  found->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  found->concurrentKernels = found->unifiedAddressing = found->cooperativeLaunch = 1;
  return cudaSuccess;
}
CALL cudaError_t cudaDeviceSynchronize() {
  Guard hold(guard);
  for (Stream *stream : captures)
    if (stream->mode == cudaStreamCaptureModeGlobal || stream->thread == std::this_thread::get_id()) {
      stream->broken = true;
      return refuse(cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize during a capture");
    }
  return cudaSuccess;
}
CALL const char *cudaGetErrorName(cudaError_t) { return "pretend"; }
CALL const char *cudaGetErrorString(cudaError_t error) {
  static thread_local char text[40];
  snprintf(text, sizeof text, "pretend CUDA error %d", static_cast<int>(error));
  return text;
}
CALL cudaError_t cudaPeekAtLastError() { return last_error; }
CALL cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

// ---- memory ----

CALL cudaError_t cudaMalloc(void **pointer, size_t bytes) {
  return forbidden("cudaMalloc during a capture") ? last_error : allocate(on_device, pointer, bytes);
}
CALL cudaError_t cudaFree(void *pointer) {
  return pointer && forbidden("cudaFree during a capture") ? last_error : release(on_device, pointer);
}
CALL cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) {
  return forbidden("cudaHostAlloc during a capture") ? last_error : allocate(pinned, pointer, bytes);
}
CALL cudaError_t cudaFreeHost(void *pointer) {
  return forbidden("cudaFreeHost during a capture") ? last_error : release(pinned, pointer);
}
CALL cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { return *all = MEMORY, *left = MEMORY - bytes_now, cudaSuccess; }
CALL cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *pointer) {
  Guard hold(guard);
  memset(found, 0, sizeof *found);
  found->type = within(on_device, pointer) ? cudaMemoryTypeDevice
                : within(pinned, pointer) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->devicePointer = found->hostPointer = const_cast<void *>(pointer);
  return cudaSuccess;
}
CALL cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
  if (forbidden("cudaMemcpy during a capture")) return last_error;
  memmove(to, from, bytes);
  return cudaSuccess;
}
CALL cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
  Guard hold(guard);
  Stream *stream = stream_of(handle);
  auto known = [](const void *pointer) { return within(on_device, pointer) || within(pinned, pointer); };
  if (stream && stream->capturing && !(known(to) && known(from))) {
    stream->broken = true;
    return refuse(cudaErrorStreamCaptureUnsupported, "a copy of pageable memory is captured");
  }
  return enqueue(handle, [=] { memmove(to, from, bytes); });
}
CALL cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) {
  return enqueue(stream, [=] { memmove(to, from, bytes); });
}
CALL cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                   size_t height, cudaMemcpyKind, cudaStream_t stream) {
  return enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row)
      memmove(static_cast<char *>(to) + row * to_pitch, static_cast<const char *>(from) + row * from_pitch, width);
  });
}
CALL cudaError_t cudaMemset(void *pointer, int value, size_t bytes) { return memset(pointer, value, bytes), cudaSuccess; }
CALL cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) {
  return enqueue(stream, [=] { memset(pointer, value, bytes); });
}
CALL cudaError_t cudaGetSymbolAddress(void **pointer, const void *) {
  static char place[4096];
  return *pointer = place, cudaSuccess;
}
CALM(cudaMemcpyToSymbol, const void *, const void *, size_t, size_t, cudaMemcpyKind)
CALM(cudaHostRegister, void *, size_t, unsigned)
CALM(cudaHostUnregister, void *)

// ---- streams and events ----

CALL cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
  return *stream = reinterpret_cast<cudaStream_t>(new Stream), cudaSuccess;
}
CALL cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
CALL cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) { return *priority = 0, cudaSuccess; }
CALL cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Stream *stream = stream_of(handle);
  if (!stream || !stream->capturing) return cudaSuccess;
  stream->broken = true;
  return refuse(cudaErrorStreamCaptureUnsupported, "a stream is waited for while it is captured");
}
CALL cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
CALM(cudaStreamDestroy, cudaStream_t)
CALM(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
CALL cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void *data) {
  return enqueue(stream, [=] { run(data); });
}
CALL cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  return *event = reinterpret_cast<cudaEvent_t>(new int), cudaSuccess;
}
CALL cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
CALL cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<int *>(event), cudaSuccess; }
CALL cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) { return enqueue(stream, [] {}); }
CALL cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t stream, unsigned) { return enqueue(stream, [] {}); }
CALL cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t) { return *ms = 1e-3f, cudaSuccess; }
CALL cudaError_t cudaEventQuery(cudaEvent_t) {
  return forbidden("cudaEventQuery during a capture") ? last_error : cudaSuccess;
}
CALL cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return forbidden("cudaEventSynchronize during a capture") ? last_error : cudaSuccess;
}

// ---- captures and graphs ----

CALL cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  return std::swap(*mode, thread_mode), cudaSuccess;
}
CALL cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  static unsigned long long number = 0;
  Guard hold(guard);
  Stream *stream = stream_of(handle);
  if (!stream) return refuse(cudaErrorStreamCaptureUnsupported, "a capture of the default stream");
  if (stream->capturing) return refuse(cudaErrorIllegalState, "a capture within a capture");
  *stream = {true, false, mode, std::this_thread::get_id(), ++number, new Graph};
  captures.insert(stream);
  return cudaSuccess;
}
CALL cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  Guard hold(guard);
  Stream *stream = stream_of(handle);
  *graph = nullptr;
  if (!stream || !stream->capturing) return refuse(cudaErrorIllegalState, "no capture to end");
  captures.erase(stream);
  stream->capturing = false;
  if (stream->thread != std::this_thread::get_id()) return refuse(cudaErrorStreamCaptureWrongThread, "ended elsewhere");
  if (stream->broken) return refuse(cudaErrorStreamCaptureInvalidated, "the capture was broken off");
  return *graph = reinterpret_cast<cudaGraph_t>(stream->graph), cudaSuccess;
}
CALL cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
  Stream *stream = stream_of(handle);
  bool is = stream && stream->capturing;
  *status = !is ? cudaStreamCaptureStatusNone
            : stream->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
CALL cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus *status, unsigned long long *number,
                                          cudaGraph_t *graph, const cudaGraphNode_t **, const cudaGraphEdgeData **,
                                          size_t *count) {
  cudaStreamIsCapturing(handle, status);
  if (*status == cudaStreamCaptureStatusNone) return cudaSuccess;
  Stream *stream = stream_of(handle);
  if (number) *number = stream->capture;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream->graph);
  if (count) *count = 0;
  return cudaSuccess;
}
CALL cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long) {
  ++graphs;
  return *made = reinterpret_cast<cudaGraphExec_t>(graph), cudaSuccess;
}
CALL cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  Guard hold(guard);
  Stream *stream = stream_of(handle);
  if (stream && stream->capturing) return refuse(cudaErrorStreamCaptureUnsupported, "a graph launched into a capture");
  ++replays;
  for (auto &work : reinterpret_cast<Graph *>(graph)->work) work();
  return cudaSuccess;
}
CALL cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count) {
  return *count = reinterpret_cast<Graph *>(graph)->work.size(), cudaSuccess;
}
CALL cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t *, cudaGraphEdgeData *, size_t *count) {
  return *count = 0, cudaSuccess;
}
CALM(cudaGraphDestroy, cudaGraph_t)
CALM(cudaGraphExecDestroy, cudaGraphExec_t)

// ---- kernels ----

CALL cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t stream) { return launch(stream); }
CALL cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t stream) { return launch(stream); }
CALL cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *with, const void *, void **) { return launch(with->stream); }
CALL void **__cudaRegisterFatBinary(void *) {
  static void *place;
  return &place;
}
CALL void __cudaRegisterFatBinaryEnd(void **) {}
CALL void __cudaUnregisterFatBinary(void **) {}
CALL char __cudaInitModule(void **) { return 1; }
CALL void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {}
CALL void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
CALL cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  return *kernel = static_cast<cudaKernel_t>(const_cast<void *>(function)), cudaSuccess;
}
static thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} configuration;
CALL unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
CALL cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *static_cast<cudaStream_t *>(stream) = configuration.stream;
  return cudaSuccess;
}
CALL cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *found, const void *) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024, found->numRegs = 32, found->ptxVersion = found->binaryVersion = 90;
  return cudaSuccess;
}
CALM(cudaFuncSetAttribute, const void *, cudaFuncAttribute, int)
CALL cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
  return *blocks = 2, cudaSuccess;
}
CALL cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                  cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- the driver, for compiled packages and triton ----

CALM_DRIVER(cuInit, unsigned)
CALM_DRIVER(cuCtxSetCurrent, CUcontext)
CALM_DRIVER(cuCtxSetLimit, CUlimit, size_t)
CALM_DRIVER(cuModuleUnload, CUmodule)
CALM_DRIVER(cuFuncSetAttribute, CUfunction, CUfunction_attribute, int)
CALM_DRIVER(cuFuncSetCacheConfig, CUfunction, CUfunc_cache)
CALM_DRIVER(cuTensorMapEncodeTiled, CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
            const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
            CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
CALL CUresult cuDeviceGet(CUdevice *device, int) { return *device = 0, CUDA_SUCCESS; }
CALL CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CALL CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CALL CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice) { return *value = attribute(which), CUDA_SUCCESS; }
CALL CUresult cuDeviceGetUuid(CUuuid *found, CUdevice) { return memset(found, 0, sizeof *found), CUDA_SUCCESS; }
CALL CUresult cuCtxGetCurrent(CUcontext *context) { return *context = reinterpret_cast<CUcontext>(16), CUDA_SUCCESS; }
CALL CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CALL CUresult cuCtxGetLimit(size_t *value, CUlimit) { return *value = 8 << 20, CUDA_SUCCESS; }
CALL CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) { return cuCtxGetCurrent(context); }
CALL CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) { return *flags = 0, *active = 1, CUDA_SUCCESS; }
CALL CUresult cuGetErrorString(CUresult, const char **text) { return *text = "pretend", CUDA_SUCCESS; }
CALL CUresult cuGetErrorName(CUresult, const char **text) { return *text = "pretend", CUDA_SUCCESS; }
CALL CUresult cuPointerGetAttribute(void *found, CUpointer_attribute which, CUdeviceptr pointer) {
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *static_cast<CUdeviceptr *>(found) = pointer;
  else *static_cast<int *>(found) = 0;
  return CUDA_SUCCESS;
}
CALL CUresult cuModuleLoadData(CUmodule *module, const void *) {
  if (forbidden("a module is loaded during a capture")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return *module = reinterpret_cast<CUmodule>(32), CUDA_SUCCESS;
}
CALL CUresult cuModuleLoad(CUmodule *module, const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) return refuse(cudaErrorUnknown, path), CUDA_ERROR_FILE_NOT_FOUND;
  fclose(file);
  return cuModuleLoadData(module, nullptr);
}
CALL CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
  return *function = reinterpret_cast<CUfunction>(strdup(name)), CUDA_SUCCESS;
}
CALL CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CALL CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned, unsigned, unsigned, unsigned,
                             CUstream stream, void **, void **) {
  if (!x || !y || !z) fprintf(stderr, "VIOLATION: %s has an empty grid\n", reinterpret_cast<char *>(function));
  return static_cast<CUresult>(launch(stream));
}
CALL CUresult cuLaunchKernelEx(const CUlaunchConfig *with, CUfunction, void **, void **) {
  return static_cast<CUresult>(launch(with->hStream));
}
CALL CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                        CUstream stream, void **) {
  return static_cast<CUresult>(launch(stream));
}
CALL CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction, const CUlaunchConfig *) { return *count = 1, CUDA_SUCCESS; }
CALL CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction, int, size_t) { return *count = 2, CUDA_SUCCESS; }
CALL CUresult cuGetProcAddress_v2(const char *name, void **function, int, cuuint64_t, CUdriverProcAddressQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// ---- cuBLAS: what must answer something; run.py adds all else that torch names, as calls that do nothing ----

static thread_local cudaStream_t blas_stream;
CALL int cublasCreate_v2(void **handle) { return *handle = malloc(1), 0; }
CALL int cublasLtCreate(void **handle) { return *handle = malloc(1), 0; }
CALL int cublasSetStream_v2(void *, cudaStream_t stream) { return blas_stream = stream, 0; }
CALL int cublasGetStream_v2(void *, cudaStream_t *stream) { return *stream = blas_stream, 0; }
CALL int cublasGetPointerMode_v2(void *, int *mode) { return *mode = 0, 0; }
CALL int cublasGetMathMode(void *, int *mode) { return *mode = 0, 0; }
CALL int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *, int *count) {
  return *count = 1, 0;
}
CALL int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *,
                        void *, void *, void *, const void *, void *, size_t, cudaStream_t stream) {
  return launch(stream);
}
#define PRODUCT(name) \
  CALL int name(...) { return launch(blas_stream); }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
