#define SPECEXPORT_ISA_NAME "portable"
#define SPECEXPORT_TABLE kPortableKernels
#include "kernels_impl.h"
