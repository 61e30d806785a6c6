#include "instructions.h"
#define __AVXVNNI__ 1
#include "../../kernels_avxvnni.cc"
