#define SPECEXPORT_ISA_NAME "avx2"
#define SPECEXPORT_TABLE kAvx2Kernels
#include "kernels_impl.h"
