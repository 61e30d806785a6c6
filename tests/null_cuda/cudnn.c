/* libcudnn without a device: descriptors hold nothing, a reduction or softmax is one piece of work on the handle's
   stream. onnxruntime looks every function up by name when it is loaded. */
#include <stdlib.h>

#include "null.h"

#define WORKSPACE 256 /* bytes that any operation asks for */

typedef struct {
  cudaStream_t stream;
} Handle;

int cudnnCreate(Handle **handle) {
  *handle = calloc(1, sizeof **handle);
  return null_unsafe("cudnnCreate", 0);
}
int cudnnDestroy(Handle *handle) {
  free(handle);
  return null_unsafe("cudnnDestroy", 0);
}
int cudnnSetStream(Handle *handle, cudaStream_t stream) {
  handle->stream = stream;
  return 0;
}
int cudnnGetStream(Handle *handle, cudaStream_t *stream) {
  *stream = handle->stream;
  return 0;
}
size_t cudnnGetVersion(void) { return 92801; }
const char *cudnnGetErrorString(int status) { return "a status of cuDNN"; }
void cudnnGetLastErrorString(char *text, size_t room) {
  if (room) *text = 0;
}

#define OBJECT(kind)                                                                \
  int cudnnCreate##kind##Descriptor(void **made) { return (*made = calloc(1, 256)) == 0; } \
  int cudnnDestroy##kind##Descriptor(void *object) {                                \
    free(object);                                                                   \
    return 0;                                                                       \
  }
OBJECT(Activation)
OBJECT(Convolution)
OBJECT(Dropout)
OBJECT(Filter)
OBJECT(LRN)
OBJECT(Pooling)
OBJECT(RNNData)
OBJECT(RNN)
OBJECT(ReduceTensor)
OBJECT(Tensor)

#define NOTHING(name) \
  int name(void) { return 0; }
NOTHING(cudnnDeriveBNTensorDescriptor)
NOTHING(cudnnGetTensorNdDescriptor)
NOTHING(cudnnSetActivationDescriptor)
NOTHING(cudnnSetConvolutionGroupCount)
NOTHING(cudnnSetConvolutionMathType)
NOTHING(cudnnSetConvolutionNdDescriptor)
NOTHING(cudnnSetDropoutDescriptor)
NOTHING(cudnnSetFilterNdDescriptor)
NOTHING(cudnnSetLRNDescriptor)
NOTHING(cudnnSetPoolingNdDescriptor)
NOTHING(cudnnSetRNNDataDescriptor)
NOTHING(cudnnSetRNNDescriptor_v8)
NOTHING(cudnnSetReduceTensorDescriptor)
NOTHING(cudnnSetTensorNdDescriptor)

int cudnnGetReductionIndicesSize(Handle *handle, void *desc, void *a, void *c, size_t *bytes) {
  *bytes = WORKSPACE;
  return 0;
}
int cudnnGetReductionWorkspaceSize(Handle *handle, void *desc, void *a, void *c, size_t *bytes) {
  *bytes = WORKSPACE;
  return 0;
}

#define WORK(name) \
  int name(Handle *handle) { return null_work(handle->stream, #name, ""); }
WORK(cudnnActivationForward)
WORK(cudnnAddTensor)
WORK(cudnnReduceTensor)
WORK(cudnnSoftmaxForward)

/* No graph of ours has these: a convolution, a recurrent net, a plan of cuDNN's own. CUDNN_STATUS_NOT_SUPPORTED. */
#define UNKNOWN(name)        \
  int name(void) {           \
    null_note(0, #name);     \
    return 3000;             \
  }
UNKNOWN(cudnnBackendCreateDescriptor)
UNKNOWN(cudnnBackendDestroyDescriptor)
UNKNOWN(cudnnBackendExecute)
UNKNOWN(cudnnBackendFinalize)
UNKNOWN(cudnnBackendGetAttribute)
UNKNOWN(cudnnBackendSetAttribute)
UNKNOWN(cudnnBatchNormalizationForwardInference)
UNKNOWN(cudnnBatchNormalizationForwardTraining)
UNKNOWN(cudnnConvolutionBiasActivationForward)
UNKNOWN(cudnnConvolutionForward)
UNKNOWN(cudnnDropoutGetStatesSize)
UNKNOWN(cudnnFindConvolutionForwardAlgorithmEx)
UNKNOWN(cudnnGetConvolutionForwardAlgorithm_v7)
UNKNOWN(cudnnGetConvolutionForwardWorkspaceSize)
UNKNOWN(cudnnGetRNNTempSpaceSizes)
UNKNOWN(cudnnGetRNNWeightParams)
UNKNOWN(cudnnLRNCrossChannelForward)
UNKNOWN(cudnnPoolingForward)
UNKNOWN(cudnnRNNForward)
