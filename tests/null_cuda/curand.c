/* libcurand without a device: onnxruntime is linked with it and calls nothing of it. */
int curand_is_null(void) { return 1; }
