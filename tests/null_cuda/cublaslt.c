/* libcublasLt without a device: descriptors hold nothing, a multiplication is one piece of work on its stream. */
#include <stdlib.h>
#include <string.h>

#include "null.h"

#define RESULT 96 /* bytes of cublasLtMatmulHeuristicResult_t */

#define OBJECT(create, destroy)                                     \
  int create(void **made) { return (*made = calloc(1, 256)) == 0; } \
  int destroy(void *object) {                                       \
    free(object);                                                   \
    return 0;                                                       \
  }
OBJECT(cublasLtCreate, cublasLtDestroy)
OBJECT(cublasLtMatmulDescCreate, cublasLtMatmulDescDestroy)
OBJECT(cublasLtMatmulPreferenceCreate, cublasLtMatmulPreferenceDestroy)
OBJECT(cublasLtMatrixLayoutCreate, cublasLtMatrixLayoutDestroy)
OBJECT(cublasLtMatrixTransformDescCreate, cublasLtMatrixTransformDescDestroy)

#define NOTHING(name) \
  int name(void) { return 0; }
NOTHING(cublasLtMatmulAlgoConfigSetAttribute)
NOTHING(cublasLtMatmulAlgoInit)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutSetAttribute)

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
  null_note(0, "cublasLtMatmulAlgoGetHeuristic");
  memset(results, 0, RESULT);
  *found = 1;
  return 0;
}
int cublasLtMatmul(void *handle, void *desc, const void *alpha, const void *a, void *layout_a, const void *b,
                   void *layout_b, const void *beta, const void *c, void *layout_c, void *d, void *layout_d,
                   const void *algorithm, void *workspace, size_t bytes, cudaStream_t stream) {
  return null_work(stream, "cublasLtMatmul", "");
}
int cublasLtMatrixTransform(void *handle, void *desc, const void *alpha, const void *a, void *layout_a, const void *beta,
                            const void *b, void *layout_b, void *c, void *layout_c, cudaStream_t stream) {
  return null_work(stream, "cublasLtMatrixTransform", "");
}
