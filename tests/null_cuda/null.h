/* What the null libraries share: their log, and the rules of work that is given to a stream. Defined in cudart.c. */
#pragma once

#include <cuda_runtime_api.h>
#include <stddef.h>

/* Writes a line of the log: a call that has no rules. */
void null_note(cudaStream_t stream, const char *call);

/* Gives work to a stream that does nothing but is counted: a kernel (by its mangled name), or a call of a library that
   launches kernels of its own. */
cudaError_t null_work(cudaStream_t stream, const char *call, const char *name);

/* A call that takes or gives back memory, or waits: what a capture on this thread would refuse. */
cudaError_t null_unsafe(const char *call, size_t bytes);
