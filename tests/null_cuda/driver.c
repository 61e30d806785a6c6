/* libcuda without a device: what onnxruntime calls of it directly, a description of memory for kernels. */
int cuTensorMapEncodeTiled(void) { return 0; }
