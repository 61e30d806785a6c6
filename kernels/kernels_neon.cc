#define SPECEXPORT_ISA_NAME "neon-dotprod"
#define SPECEXPORT_TABLE kNeonKernels
#include "kernels_impl.h"
