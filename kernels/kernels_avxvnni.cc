#define SPECEXPORT_ISA_NAME "avx-vnni"
#define SPECEXPORT_TABLE kAvxVnniKernels
#include "kernels_impl.h"
