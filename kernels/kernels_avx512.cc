#define SPECEXPORT_ISA_NAME "avx512-vnni"
#define SPECEXPORT_TABLE kAvx512Kernels
#include "kernels_impl.h"
