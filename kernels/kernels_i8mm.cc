#define SPECEXPORT_ISA_NAME "neon-i8mm"
#define SPECEXPORT_TABLE kI8mmKernels
#include "kernels_impl.h"
