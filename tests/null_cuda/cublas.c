/* libcublas without a device: a multiplication is one piece of work on the handle's stream. */
#include <stdlib.h>

#include "null.h"

typedef struct {
  cudaStream_t stream;
} Handle;

int cublasCreate_v2(Handle **handle) {
  *handle = calloc(1, sizeof **handle);
  return null_unsafe("cublasCreate", 0); /* it takes a workspace */
}
int cublasDestroy_v2(Handle *handle) {
  free(handle);
  return null_unsafe("cublasDestroy", 0);
}
int cublasSetStream_v2(Handle *handle, cudaStream_t stream) {
  handle->stream = stream;
  return 0;
}
int cublasSetMathMode(Handle *handle, int mode) { return 0; }
int cublasGetMathMode(Handle *handle, int *mode) { return *mode = 0; }
const char *cublasGetStatusName(int status) { return "a status of cuBLAS"; }
const char *cublasGetStatusString(int status) { return "a status of cuBLAS"; }

/* The handle is the first argument of all of them, and what follows changes nothing here. */
#define WORK(name) \
  int name(Handle *handle) { return null_work(handle->stream, #name, ""); }
WORK(cublasDgeam)
WORK(cublasDgemmBatched)
WORK(cublasDgemmStridedBatched)
WORK(cublasDgemm_v2)
WORK(cublasDgetrfBatched)
WORK(cublasDgetriBatched)
WORK(cublasGemmBatchedEx)
WORK(cublasGemmEx)
WORK(cublasGemmStridedBatchedEx)
WORK(cublasScopy_v2)
WORK(cublasSgeam)
WORK(cublasSgemmBatched)
WORK(cublasSgemmStridedBatched)
WORK(cublasSgemm_v2)
WORK(cublasSgetrfBatched)
WORK(cublasSgetriBatched)
WORK(cublasSscal_v2)
