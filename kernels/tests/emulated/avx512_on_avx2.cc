#include "instructions.h"
#define __AVX512BW__ 1
#define __AVX512VNNI__ 1
#include "../../kernels_avx512.cc"
