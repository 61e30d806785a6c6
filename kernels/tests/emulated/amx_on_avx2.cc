#include "instructions.h"
#define __AVX512BW__ 1
#define __AVX512VNNI__ 1
#include "tiles.h"
#include "../../kernels_amx.cc"
