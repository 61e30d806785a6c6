/* libcudart without a device. Memory is the host's, copies are copies, kernels do nothing, and every call is logged.

   Work given to a stream is done when something waits for it and not before, all streams in the order in which it was
   given: a missing wait, or a buffer that is written too early, shows in the data. A launched graph does the copies that
   were recorded in it. What a capture would refuse is refused, with the runtime's own status, and ends the capture.

   Environment: NULL_CUDA_LOG, a file that lines are appended to (no log without it); NULL_CUDA_SM, the compute
   capability, 90 unless told; NULL_CUDA_GIB, the memory, 16 unless told; NULL_CUDA_ZEROS=1 lets all that is copied from
   the device into pinned memory arrive as zeros: what lies where no kernel wrote may be anything, and a program that
   acts on it would do what it never does on a device.

   A line of the log is, between tabs: thread, the capture that the call is part of or made in (0 for none), stream,
   status, why it is illegal (empty where it is not), call, bytes, name. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "null.h"

/* --- lists and the lock ------------------------------------------------------------------------------------------ */

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static void unlock(void *unused) { pthread_mutex_unlock(&lock); }
/* Until the end of the function. */
#define LOCKED \
  int locked __attribute__((cleanup(unlock), unused)) = pthread_mutex_lock(&lock)

/* Makes room for one more element of a growing array. */
static void *grown(void *items, size_t count, size_t *room, size_t size) {
  if (count < *room) return items;
  *room = *room ? 2 * *room : 64;
  items = realloc(items, *room * size);
  if (!items) abort();
  return items;
}

static long thread(void) {
  static __thread long known;
  return known ? known : (known = syscall(SYS_gettid));
}

static long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

/* --- work, streams and captures ---------------------------------------------------------------------------------- */

struct work {
  enum { KERNEL, COPY, FILL, HOST } kind;
  char *to, *from;
  size_t to_pitch, from_pitch, width, rows;
  int value;          /* of FILL */
  char *staged;       /* COPY from pageable memory: what was there, in memory of ours */
  cudaHostFn_t call;  /* of HOST */
  void *argument;
};

struct works {
  struct work *items;
  size_t count, room;
};

struct capture {
  long id, thread;
  enum cudaStreamCaptureMode mode;
  struct CUstream_st *origin;
  int broken;
  struct works works;
};

struct CUstream_st {
  int live, blocking;
  struct capture *capture;
  long given;  /* pieces of work while capturing */
  long joined; /* how many of them the origin waits for; of a stream that joined a capture by an event */
};

struct CUevent_st {
  int live, timed, recorded;
  long capture, given; /* which capture recorded it, and after how much of its stream's work */
  struct CUstream_st *stream;
};

struct graph { /* cudaGraph_t and cudaGraphExec_t */
  long id;
  int live;
  struct works works;
};

static struct CUstream_st legacy = {1, 1}; /* stream 0, which blocking streams wait for */
static struct {
  struct CUstream_st **items;
  size_t count, room;
} streams;
static struct {
  struct capture **items;
  size_t count, room;
} captures;
static struct works pending;
static long ids;

static struct CUstream_st *real(cudaStream_t stream) {
  if (stream == 0 || stream == cudaStreamLegacy || stream == cudaStreamPerThread) return &legacy;
  for (size_t i = 0; i < streams.count; i++)
    if (streams.items[i] == stream) return stream->live ? stream : 0;
  return 0;
}

/* The capture that forbids calls to this thread: its own, unless relaxed, or a global one of any thread. */
static struct capture *forbidding(void) {
  for (size_t i = 0; i < captures.count; i++) {
    struct capture *one = captures.items[i];
    if (one->mode == cudaStreamCaptureModeGlobal) return one;
    if (one->mode == cudaStreamCaptureModeThreadLocal && one->thread == thread()) return one;
  }
  return 0;
}

/* --- the log ------------------------------------------------------------------------------------------------------- */

static __thread cudaError_t last;

static FILE *log_file(void) {
  static FILE *file;
  static int asked;
  if (!asked) {
    asked = 1;
    const char *path = getenv("NULL_CUDA_LOG");
    file = path ? fopen(path, "a") : 0;
    if (path && !file) perror(path), abort();
  }
  return file;
}

/* Logs a call and gives its status. */
static cudaError_t answer(cudaStream_t stream, const char *call, size_t bytes, const char *name, cudaError_t status,
                          const char *illegal) {
  if (status) last = status;
  FILE *file = log_file();
  if (!file) return status;
  struct CUstream_st *of = real(stream);
  struct capture *in = of && of->capture ? of->capture : forbidding();
  fprintf(file, "%ld\t%ld\t%p\t%d\t%s\t%s\t%zu\t%s\n", thread(), in ? in->id : 0, (void *)stream, status, illegal, call,
          bytes, name);
  return status;
}

static cudaError_t fine(const char *call, size_t bytes) { return answer(0, call, bytes, "", cudaSuccess, ""); }

void null_note(cudaStream_t stream, const char *call) {
  LOCKED;
  answer(stream, call, 0, "", cudaSuccess, "");
}

/* Lines of the caller's own, between those of the calls; everything before them is in the file afterwards. */
void null_cuda_mark(const char *text) {
  LOCKED;
  answer(0, "mark", 0, text, cudaSuccess, "");
  if (log_file()) fflush(log_file());
}

/* --- memory -------------------------------------------------------------------------------------------------------- */

struct allocation {
  char *base;
  size_t bytes, taken;
  enum cudaMemoryType type;
};
static struct {
  struct allocation *items; /* by address */
  size_t count, room;
} memory;
static size_t device_bytes;

static size_t total(void) { return (size_t)setting("NULL_CUDA_GIB", 16) << 30; }

/* Where an allocation that begins at or before an address is in the list, plus one. */
static size_t after(const char *address) {
  size_t low = 0, high = memory.count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (memory.items[middle].base <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

static struct allocation *holding(const char *address) {
  size_t at = after(address);
  struct allocation *found = at ? &memory.items[at - 1] : 0;
  return found && address < found->base + found->taken ? found : 0;
}

static enum cudaMemoryType type_of(const char *address) {
  struct allocation *found = holding(address);
  return found ? found->type : cudaMemoryTypeUnregistered;
}

/* Zeros, as nothing will write what kernels would. */
static void *take(size_t bytes, enum cudaMemoryType type) {
  size_t taken = (bytes + 4095 + !bytes) & ~(size_t)4095;
  if (type == cudaMemoryTypeDevice && device_bytes + taken > total()) return 0;
  char *base = mmap(0, taken, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return 0;
  memory.items = grown(memory.items, memory.count, &memory.room, sizeof *memory.items);
  size_t at = after(base);
  memmove(memory.items + at + 1, memory.items + at, (memory.count++ - at) * sizeof *memory.items);
  memory.items[at] = (struct allocation){base, bytes, taken, type};
  if (type == cudaMemoryTypeDevice) device_bytes += taken;
  return base;
}

static int give_back(char *base) {
  size_t at = after(base);
  if (!at || memory.items[at - 1].base != base) return 0;
  struct allocation gone = memory.items[--at];
  memmove(memory.items + at, memory.items + at + 1, (--memory.count - at) * sizeof *memory.items);
  if (gone.type == cudaMemoryTypeDevice) device_bytes -= gone.taken;
  return !munmap(gone.base, gone.taken);
}

/* --- doing work ---------------------------------------------------------------------------------------------------- */

static void add(struct works *works, struct work work) {
  works->items = grown(works->items, works->count, &works->room, sizeof work);
  works->items[works->count++] = work;
}

static void add_all(struct works *to, const struct works *from) {
  for (size_t i = 0; i < from->count; i++)
    if (from->items[i].kind != KERNEL) add(to, from->items[i]);
}

static size_t span(size_t pitch, size_t width, size_t rows) { return rows ? (rows - 1) * pitch + width : 0; }

/* Whether two rows of a copy lie on each other; what then arrives is not defined. */
static int overlaps(const struct work *work) {
  char *to = work->to, *from = work->from;
  if (to >= from + span(work->from_pitch, work->width, work->rows)) return 0;
  if (from >= to + span(work->to_pitch, work->width, work->rows)) return 0;
  for (size_t i = 0; i < work->rows; i++)
    for (size_t j = 0; j < work->rows; j++) {
      char *a = to + i * work->to_pitch, *b = from + j * work->from_pitch;
      if (a < b + work->width && b < a + work->width) return 1;
    }
  return 0;
}

/* What is wrong with a copy's or fill's place: memory that is not whole inside one allocation; pageable memory is not
   known to us. */
static const char *wrong(const char *address, size_t bytes) {
  struct allocation *found = holding(address);
  if (!bytes) return "";
  if (found && address + bytes > found->base + found->bytes) return "reaches behind an allocation";
  return "";
}

static void do_work(struct work *work) {
  const char *illegal = "";
  if (work->kind == HOST) work->call(work->argument);
  if (work->kind != COPY && work->kind != FILL) return;
  size_t to = span(work->to_pitch, work->width, work->rows), from = span(work->from_pitch, work->width, work->rows);
  illegal = wrong(work->to, to);
  if (work->kind == COPY && !work->staged && !*illegal) {
    illegal = wrong(work->from, from);
    if (!*illegal && overlaps(work)) illegal = "copies between rows that overlap";
  }
  static long zeros = -1;
  if (zeros < 0) zeros = setting("NULL_CUDA_ZEROS", 0);
  int results = zeros && work->kind == COPY && type_of(work->to) == cudaMemoryTypeHost &&
                type_of(work->from) == cudaMemoryTypeDevice;
  if (*illegal) answer(0, "doing a copy", work->width * work->rows, "", cudaErrorIllegalAddress, illegal);
  for (size_t row = 0; row < work->rows && !*illegal; row++) {
    char *at = work->to + row * work->to_pitch;
    if (work->kind == FILL || results) memset(at, work->value, work->width);
    else memmove(at, (work->staged ? work->staged : work->from) + row * work->from_pitch, work->width);
  }
  free(work->staged);
}

/* Does everything that was given to any stream. */
static void finish(void) {
  struct works now = pending;
  pending = (struct works){0};
  for (size_t i = 0; i < now.count; i++) do_work(&now.items[i]);
  if (pending.count) { /* given by a host function meanwhile */
    free(now.items);
    return;
  }
  now.count = 0;
  pending = now;
}

/* --- giving work --------------------------------------------------------------------------------------------------- */

static cudaError_t refuse(struct capture *capture, cudaStream_t stream, const char *call, size_t bytes,
                          cudaError_t status, const char *why) {
  if (capture) capture->broken = 1;
  return answer(stream, call, bytes, "", status, why);
}

/* Work for a stream: recorded where the stream is captured, else done at the next wait. */
static cudaError_t give(cudaStream_t handle, const char *call, size_t bytes, const char *name, struct work work) {
  struct CUstream_st *stream = real(handle);
  if (!stream) return refuse(0, handle, call, bytes, cudaErrorInvalidResourceHandle, "no such stream");
  struct capture *capture = stream->capture, *own = forbidding();
  if (capture && capture->broken)
    return answer(handle, call, bytes, name, cudaErrorStreamCaptureInvalidated, "its capture is broken");
  if (capture) {
    if (work.kind == COPY && (!holding(work.to) || !holding(work.from)))
      return refuse(capture, handle, call, bytes, cudaErrorStreamCaptureUnsupported,
                    "a captured copy of pageable memory");
    stream->given++;
    add(&capture->works, work);
    return answer(handle, call, bytes, name, cudaSuccess, "");
  }
  if (stream == &legacy)
    for (size_t i = 0; i < captures.count; i++)
      if (captures.items[i]->origin->blocking)
        return refuse(captures.items[i], handle, call, bytes, cudaErrorStreamCaptureImplicit,
                      "the legacy stream, while a stream that waits for it is captured");
  if (work.kind == COPY && !work.rows) return answer(handle, call, bytes, name, cudaSuccess, "");
  if (work.kind == COPY && !holding(work.to)) { /* to pageable memory: the call waits */
    add(&pending, work);
    finish();
  } else if (work.kind == COPY && !holding(work.from)) { /* from pageable memory: it is read before the call returns */
    size_t bytes_read = span(work.from_pitch, work.width, work.rows);
    work.staged = memcpy(malloc(bytes_read + !bytes_read), work.from, bytes_read);
    add(&pending, work);
  } else if (work.kind != KERNEL) {
    add(&pending, work);
  }
  /* CUDA allows it; but what the thread believes to be part of its graph is not. */
  return answer(handle, call, bytes, name, cudaSuccess,
                own && own->mode == cudaStreamCaptureModeThreadLocal ? "goes past the capture of this thread" : "");
}

cudaError_t null_work(cudaStream_t stream, const char *call, const char *name) {
  LOCKED;
  return give(stream, call, 0, name, (struct work){KERNEL});
}

cudaError_t null_unsafe(const char *call, size_t bytes) {
  LOCKED;
  struct capture *own = forbidding();
  if (own) return refuse(own, 0, call, bytes, cudaErrorStreamCaptureUnsupported, "not allowed in a capture");
  return fine(call, bytes);
}

/* --- kernels ------------------------------------------------------------------------------------------------------- */

static struct {
  struct kernel {
    const void *stub;
    const char *name;
  } *items;
  size_t count, room;
  int sorted;
} kernels;

static int by_stub(const void *a, const void *b) {
  const struct kernel *one = a, *other = b;
  return (one->stub > other->stub) - (one->stub < other->stub);
}

static const char *kernel_name(const void *stub) {
  if (!kernels.sorted) qsort(kernels.items, kernels.count, sizeof *kernels.items, by_stub);
  kernels.sorted = 1;
  struct kernel wanted = {stub}, *found = 0;
  if (kernels.count) found = bsearch(&wanted, kernels.items, kernels.count, sizeof wanted, by_stub);
  return found ? found->name : "(not registered)";
}

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size, int constant,
                       int global) {}
void __cudaRegisterFunction(void **handle, const char *stub, char *function, const char *name, int limit, uint3 *tid,
                            uint3 *bid, dim3 *block, dim3 *grid, int *warp) {
  LOCKED;
  kernels.items = grown(kernels.items, kernels.count, &kernels.room, sizeof *kernels.items);
  kernels.items[kernels.count++] = (struct kernel){stub, name};
  kernels.sorted = 0;
}

static __thread struct {
  dim3 grid, block;
  size_t shared;
  struct CUstream_st *stream;
} configuration; /* between <<<...>>> and the kernel's stub */

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  configuration.grid = grid, configuration.block = block;
  configuration.shared = shared, configuration.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid, *block = configuration.block;
  *shared = configuration.shared, *(struct CUstream_st **)stream = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub) {
  *kernel = (cudaKernel_t)stub;
  return cudaSuccess;
}

static cudaError_t launch(const void *stub, dim3 grid, dim3 block, cudaStream_t stream) {
  char name[4096];
  LOCKED;
  if (log_file())
    snprintf(name, sizeof name, "%s %u,%u,%u %u,%u,%u", kernel_name(stub), grid.x, grid.y, grid.z, block.x, block.y,
             block.z);
  return give(stream, "kernel", 0, name, (struct work){KERNEL});
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return launch(kernel, grid, block, stream);
}
cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  return launch(stub, grid, block, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
  return launch(stub, grid, block, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *stub, void **arguments) {
  return launch(stub, config->gridDim, config->blockDim, config->stream);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *argument) {
  LOCKED;
  return give(stream, "cudaLaunchHostFunc", 0, "", (struct work){HOST, .call = call, .argument = argument});
}

static int capability(void) { return setting("NULL_CUDA_SM", 90); }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *stub) {
  *attributes = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32};
  attributes->binaryVersion = attributes->ptxVersion = capability();
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *stub, enum cudaFuncAttribute attribute, int value) { return cudaSuccess; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value, int device) {
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *stub, int threads,
                                                                   size_t shared, unsigned flags) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **jit_values,
                                unsigned jits, enum cudaLibraryOption *options, void **values, unsigned count) {
  static char any;
  *library = (cudaLibrary_t)&any;
  return null_unsafe("cudaLibraryLoadData", 0);
}
cudaError_t cudaLibraryUnload(cudaLibrary_t library) { return cudaSuccess; }
cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
  char *stub = strdup(name); /* its address stands for the kernel; loaded once a process, so never freed */
  __cudaRegisterFunction(0, stub, 0, stub, 0, 0, 0, 0, 0, 0);
  *kernel = (cudaKernel_t)stub;
  return cudaSuccess;
}

/* --- taking memory ------------------------------------------------------------------------------------------------- */

static cudaError_t allocate(void **address, size_t bytes, enum cudaMemoryType type, const char *call) {
  LOCKED;
  struct capture *own = forbidding();
  *address = 0;
  if (own) return refuse(own, 0, call, bytes, cudaErrorStreamCaptureUnsupported, "not allowed in a capture");
  *address = take(bytes, type);
  return answer(0, call, bytes, "", *address ? cudaSuccess : cudaErrorMemoryAllocation, "");
}
static cudaError_t release(void *address, const char *call) {
  LOCKED;
  struct capture *own = forbidding();
  if (own) return refuse(own, 0, call, 0, cudaErrorStreamCaptureUnsupported, "not allowed in a capture");
  finish();
  if (address && !give_back(address))
    return answer(0, call, 0, "", cudaErrorInvalidValue, "was not taken, or is given back already");
  return fine(call, 0);
}
#undef cudaMalloc
#undef cudaMallocHost
#undef cudaHostAlloc
cudaError_t cudaMalloc(void **address, size_t bytes) {
  return allocate(address, bytes, cudaMemoryTypeDevice, "cudaMalloc");
}
cudaError_t cudaMallocHost(void **address, size_t bytes) {
  return allocate(address, bytes, cudaMemoryTypeHost, "cudaMallocHost");
}
cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
  return allocate(address, bytes, cudaMemoryTypeHost, "cudaHostAlloc");
}
cudaError_t cudaFree(void *address) { return release(address, "cudaFree"); }
cudaError_t cudaFreeHost(void *address) { return release(address, "cudaFreeHost"); }

/* From pools: in the stream's order, so allowed in captures; a graph that allocates is still logged as one that does. */
cudaError_t cudaMallocFromPoolAsync(void **address, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  LOCKED;
  *address = take(bytes, cudaMemoryTypeDevice);
  return answer(stream, "cudaMallocFromPoolAsync", bytes, "", *address ? cudaSuccess : cudaErrorMemoryAllocation, "");
}
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
  LOCKED;
  finish();
  return answer(stream, "cudaFreeAsync", 0, "", give_back(address) ? cudaSuccess : cudaErrorInvalidValue, "");
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties) {
  static char any;
  *pool = (cudaMemPool_t)&any;
  return null_unsafe("cudaMemPoolCreate", 0);
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  memset(value, 0, sizeof(unsigned long long));
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  LOCKED;
  *total_bytes = total();
  *free_bytes = total() - device_bytes;
  return fine("cudaMemGetInfo", 0);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  LOCKED;
  *attributes = (struct cudaPointerAttributes){.type = type_of(address)};
  if (attributes->type) attributes->devicePointer = (void *)address;
  if (attributes->type == cudaMemoryTypeHost) attributes->hostPointer = (void *)address;
  return cudaSuccess;
}

/* --- copies -------------------------------------------------------------------------------------------------------- */

static const char *kind_name(const char *from, const char *to, enum cudaMemcpyKind kind, char *text, size_t room) {
  static const char *names[] = {"pageable", "pinned", "device"};
  snprintf(text, room, "%s>%s %p %p", names[type_of(from)], names[type_of(to)], (void *)from, (void *)to);
  return text;
}

static int against_its_kind(const char *from, const char *to, enum cudaMemcpyKind kind) {
  int from_device = type_of(from) == cudaMemoryTypeDevice, to_device = type_of(to) == cudaMemoryTypeDevice;
  switch (kind) {
    case cudaMemcpyHostToHost: return from_device || to_device;
    case cudaMemcpyHostToDevice: return from_device || !to_device;
    case cudaMemcpyDeviceToHost: return !from_device || to_device;
    case cudaMemcpyDeviceToDevice: return !from_device || !to_device;
    default: return 0;
  }
}

static cudaError_t copy(const char *call, struct work work, enum cudaMemcpyKind kind, cudaStream_t stream) {
  char name[128];
  LOCKED;
  size_t bytes = work.width * work.rows;
  const char *text = log_file() ? kind_name(work.from, work.to, kind, name, sizeof name) : "";
  if (bytes && against_its_kind(work.from, work.to, kind))
    return answer(stream, call, bytes, text, cudaErrorInvalidMemcpyDirection, "not the direction it was said to be");
  if (work.width > work.to_pitch || work.width > work.from_pitch)
    return answer(stream, call, bytes, text, cudaErrorInvalidPitchValue, "rows longer than their pitch");
  return give(stream, call, bytes, text, work);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy("cudaMemcpyAsync", (struct work){COPY, to, (char *)from, bytes, bytes, bytes, bytes > 0}, kind, stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy("cudaMemcpy2DAsync", (struct work){COPY, to, (char *)from, to_pitch, from_pitch, width, rows}, kind,
              stream);
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  LOCKED;
  return give(stream, "cudaMemsetAsync", bytes, "",
              (struct work){FILL, to, .to_pitch = bytes, .width = bytes, .rows = bytes > 0, .value = value});
}

/* Those that wait use the legacy stream. */
static cudaError_t waiting(const char *call, size_t bytes, struct work work) {
  LOCKED;
  struct capture *own = forbidding();
  if (own) return refuse(own, 0, call, bytes, cudaErrorStreamCaptureUnsupported, "waits in a capture");
  cudaError_t status = give(0, call, bytes, "", work);
  finish();
  return status;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  return waiting("cudaMemcpy", bytes, (struct work){COPY, to, (char *)from, bytes, bytes, bytes, bytes > 0});
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  return waiting("cudaMemset", bytes,
                 (struct work){FILL, to, .to_pitch = bytes, .width = bytes, .rows = bytes > 0, .value = value});
}
cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t bytes, size_t offset, enum cudaMemcpyKind kind) {
  memset(to, 0, bytes);
  return waiting("cudaMemcpyFromSymbol", bytes, (struct work){KERNEL});
}

/* --- streams and events -------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  LOCKED;
  *stream = calloc(1, sizeof **stream); /* never freed: a handle that is used too late is known to be one */
  **stream = (struct CUstream_st){.live = 1, .blocking = !(flags & cudaStreamNonBlocking)};
  streams.items = grown(streams.items, streams.count, &streams.room, sizeof *streams.items);
  streams.items[streams.count++] = *stream;
  return answer(*stream, "cudaStreamCreate", 0, "", cudaSuccess, "");
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  LOCKED;
  struct CUstream_st *of = real(stream);
  if (!of || of == &legacy)
    return answer(stream, "cudaStreamDestroy", 0, "", cudaErrorInvalidResourceHandle, "no such stream");
  finish();
  of->live = 0;
  return answer(stream, "cudaStreamDestroy", 0, "", cudaSuccess, "");
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  LOCKED;
  struct CUstream_st *of = real(stream);
  if (!of) return answer(stream, "cudaStreamSynchronize", 0, "", cudaErrorInvalidResourceHandle, "no such stream");
  /* Of another stream than the captured one a driver may allow it; nothing of ours should wait there either way. */
  struct capture *refusing = of->capture ? of->capture : forbidding();
  if (refusing)
    return refuse(refusing, stream, "cudaStreamSynchronize", 0, cudaErrorStreamCaptureUnsupported,
                  "waits in a capture");
  finish();
  return answer(stream, "cudaStreamSynchronize", 0, "", cudaSuccess, "");
}
cudaError_t cudaDeviceSynchronize(void) {
  LOCKED;
  if (captures.count)
    return refuse(captures.items[0], 0, "cudaDeviceSynchronize", 0, cudaErrorStreamCaptureUnsupported,
                  "waits for streams of which one is captured");
  finish();
  return fine("cudaDeviceSynchronize", 0);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = calloc(1, sizeof **event);
  **event = (struct CUevent_st){.live = 1, .timed = !(flags & cudaEventDisableTiming)};
  return fine("cudaEventCreate", 0);
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  LOCKED;
  if (!event || !event->live)
    return answer(0, "cudaEventDestroy", 0, "", cudaErrorInvalidResourceHandle, "no such event");
  event->live = 0; /* never freed, as streams */
  return fine("cudaEventDestroy", 0);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  LOCKED;
  struct CUstream_st *of = real(stream);
  if (!of || !event->live)
    return answer(stream, "cudaEventRecord", 0, "", cudaErrorInvalidResourceHandle, "no such stream or event");
  event->recorded = 1;
  event->stream = of;
  event->capture = of->capture ? of->capture->id : 0;
  event->given = of->given;
  return answer(stream, "cudaEventRecord", 0, "", cudaSuccess, "");
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  LOCKED;
  struct capture *own = forbidding();
  if (event->capture && event->stream->capture)
    return refuse(event->stream->capture, 0, "cudaEventSynchronize", 0, cudaErrorCapturedEvent,
                  "waits for an event of a capture");
  if (own)
    return refuse(own, 0, "cudaEventSynchronize", 0, cudaErrorStreamCaptureUnsupported, "waits in a capture");
  finish();
  return fine("cudaEventSynchronize", 0);
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->recorded || !end->recorded || !start->timed || !end->timed)
    return answer(0, "cudaEventElapsedTime", 0, "", cudaErrorInvalidResourceHandle, "events that were not timed");
  *milliseconds = 1; /* whatever lies between: libraries that time their kernels choose the same in every run */
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  static const char *call = "cudaStreamWaitEvent";
  LOCKED;
  struct CUstream_st *of = real(stream);
  if (!of) return answer(stream, call, 0, "", cudaErrorInvalidResourceHandle, "no such stream");
  struct capture *theirs = event->recorded && event->capture ? event->stream->capture : 0;
  if (of->capture && event->recorded && !theirs)
    return refuse(of->capture, stream, call, 0, cudaErrorStreamCaptureIsolation,
                  "a captured stream waits for work outside of the capture");
  if (of->capture && theirs && of->capture != theirs)
    return refuse(of->capture, stream, call, 0, cudaErrorStreamCaptureMerge, "would merge two captures");
  if (theirs && of == &legacy)
    return refuse(theirs, stream, call, 0, cudaErrorStreamCaptureUnsupported, "the legacy stream cannot be captured");
  if (theirs && !of->capture) of->capture = theirs, of->given = 1, of->joined = 0; /* it is captured from here on */
  else if (theirs && of == theirs->origin) event->stream->joined = event->given;
  return answer(stream, call, 0, "", cudaSuccess, "");
}

/* --- captures and graphs ------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  static const char *call = "cudaStreamBeginCapture";
  LOCKED;
  struct CUstream_st *of = real(stream);
  if (!of) return answer(stream, call, 0, "", cudaErrorInvalidResourceHandle, "no such stream");
  if (of == &legacy)
    return answer(stream, call, 0, "", cudaErrorStreamCaptureUnsupported, "the legacy stream cannot be captured");
  if (of->capture) return refuse(of->capture, stream, call, 0, cudaErrorIllegalState, "is being captured already");
  struct capture *capture = calloc(1, sizeof *capture);
  *capture = (struct capture){.id = ++ids, .thread = thread(), .mode = mode, .origin = of};
  captures.items = grown(captures.items, captures.count, &captures.room, sizeof *captures.items);
  captures.items[captures.count++] = capture;
  of->capture = capture;
  of->given = 0;
  return answer(stream, call, 0, "", cudaSuccess, "");
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  static const char *call = "cudaStreamEndCapture";
  LOCKED;
  struct CUstream_st *of = real(stream);
  *graph = 0;
  if (!of || !of->capture) return answer(stream, call, 0, "", cudaErrorIllegalState, "is not being captured");
  struct capture *capture = of->capture;
  if (capture->origin != of)
    return refuse(capture, stream, call, 0, cudaErrorStreamCaptureUnmatched, "did not begin its capture");
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != thread())
    return refuse(capture, stream, call, 0, cudaErrorStreamCaptureWrongThread, "another thread began its capture");
  int unjoined = 0;
  for (size_t i = 0; i < streams.count; i++) {
    struct CUstream_st *one = streams.items[i];
    if (one->capture != capture) continue;
    unjoined |= one != of && one->joined < one->given;
    one->capture = 0;
  }
  for (size_t i = 0; i < captures.count; i++)
    if (captures.items[i] == capture) captures.items[i] = captures.items[--captures.count];
  struct works works = capture->works;
  int broken = capture->broken;
  char name[32];
  snprintf(name, sizeof name, "capture %ld", capture->id);
  struct graph *made = calloc(1, sizeof *made);
  *made = (struct graph){.id = capture->id, .live = 1, .works = works};
  free(capture);
  if (broken) return answer(stream, call, 0, name, cudaErrorStreamCaptureInvalidated, "its capture is broken");
  if (unjoined)
    return answer(stream, call, 0, name, cudaErrorStreamCaptureUnjoined, "a stream of the capture was not joined");
  *graph = (cudaGraph_t)made;
  return answer(stream, call, 0, name, cudaSuccess, "");
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  LOCKED;
  struct CUstream_st *of = real(stream);
  if (!of) return cudaErrorInvalidResourceHandle;
  *status = !of->capture          ? cudaStreamCaptureStatusNone
            : of->capture->broken ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

static cudaError_t of_graph(cudaStream_t stream, const char *call, const struct graph *graph) {
  char name[32];
  if (!graph || !graph->live) return answer(stream, call, 0, "", cudaErrorInvalidValue, "no such graph");
  snprintf(name, sizeof name, "capture %ld", graph->id);
  return answer(stream, call, 0, name, cudaSuccess, "");
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t handle, unsigned long long flags) {
  LOCKED;
  const struct graph *graph = (struct graph *)handle;
  struct graph *made = calloc(1, sizeof *made);
  cudaError_t status = of_graph(0, "cudaGraphInstantiate", graph);
  if (status) return status;
  *made = (struct graph){.id = graph->id, .live = 1};
  for (size_t i = 0; i < graph->works.count; i++) add(&made->works, graph->works.items[i]);
  *executable = (cudaGraphExec_t)made;
  return status;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  LOCKED;
  const struct graph *graph = (struct graph *)executable;
  struct CUstream_st *of = real(stream);
  if (!of) return answer(stream, "cudaGraphLaunch", 0, "", cudaErrorInvalidResourceHandle, "no such stream");
  cudaError_t status = of_graph(stream, "cudaGraphLaunch", graph);
  if (!status) add_all(of->capture ? &of->capture->works : &pending, &graph->works);
  return status;
}
static cudaError_t destroy(const char *call, struct graph *graph) {
  LOCKED;
  cudaError_t status = of_graph(0, call, graph);
  if (status) return status;
  graph->live = 0; /* the struct stays, as those of streams */
  free(graph->works.items);
  graph->works = (struct works){0};
  return status;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return destroy("cudaGraphDestroy", (struct graph *)graph); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return destroy("cudaGraphExecDestroy", (struct graph *)executable);
}

/* --- the device and errors ----------------------------------------------------------------------------------------- */

#define MULTIPROCESSORS 132
#define SHARED_A_BLOCK (227 << 10)
#define SHARED_A_MULTIPROCESSOR (228 << 10)
#define L2 (50 << 20)

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  *properties = (struct cudaDeviceProp){
      .name = "Null GPU",
      .major = capability() / 10,
      .minor = capability() % 10,
      .totalGlobalMem = total(),
      .multiProcessorCount = MULTIPROCESSORS,
      .warpSize = 32,
      .maxThreadsPerBlock = 1024,
      .maxThreadsPerMultiProcessor = 2048,
      .maxBlocksPerMultiProcessor = 32,
      .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {0x7fffffff, 0xffff, 0xffff},
      .sharedMemPerBlock = 48 << 10,
      .sharedMemPerBlockOptin = SHARED_A_BLOCK,
      .sharedMemPerMultiprocessor = SHARED_A_MULTIPROCESSOR,
      .regsPerBlock = 65536,
      .regsPerMultiprocessor = 65536,
      .l2CacheSize = L2,
      .unifiedAddressing = 1,
      .concurrentKernels = 1,
      .memoryBusWidth = 5120,
  };
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_A_BLOCK; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = SHARED_A_MULTIPROCESSOR; break;
    case cudaDevAttrL2CacheSize: *value = L2; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 0xffff; break;
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: /* logged, as a guess may send a library down another path than a GPU does */
      *value = 0;
      null_note(0, "cudaDeviceGetAttribute, not known");
  }
  return cudaSuccess;
}

static int succeeds(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  LOCKED;
  *function = (void *)succeeds;
  if (result) *result = cudaDriverEntryPointSuccess;
  return answer(0, "cudaGetDriverEntryPoint", 0, symbol, cudaSuccess, "");
}

cudaError_t cudaGetLastError(void) {
  cudaError_t found = last;
  last = cudaSuccess;
  return found;
}
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t error) {
  static __thread char text[32];
  snprintf(text, sizeof text, "cudaError %d", error);
  return text;
}
const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorMemoryAllocation: return "out of memory";
    default: return cudaGetErrorName(error);
  }
}
