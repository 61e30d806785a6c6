/* libnccl without a device: ranks do not wait for each other, and what they give a stream is counted. */
#include "null.h"

#include <string.h>

typedef struct {
  char internal[128];
} ncclUniqueId;

int ncclGetUniqueId(ncclUniqueId *id) { return memset(id->internal, 1, sizeof id->internal), 0; }

int ncclCommInitRank(void **made, int ranks, ncclUniqueId id, int rank) {
  static int communicator;
  if (rank < 0 || rank >= ranks || id.internal[0] != 1) return 4;
  return *made = &communicator, 0;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *made, cudaStream_t stream) {
  return from && to && count && type && !operation && made ? (int)null_work(stream, "ncclAllReduce", "") : 4;
}

int ncclAllGather(const void *from, void *to, size_t count, int type, void *made, cudaStream_t stream) {
  return from && to && count && type && made ? (int)null_work(stream, "ncclAllGather", "") : 4;
}

int ncclCommAbort(void *made) { return made ? 0 : 4; }

const char *ncclGetErrorString(int status) { return status ? "invalid argument" : "no error"; }
