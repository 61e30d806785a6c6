// The kernels of an instruction set: compiled once for each by the files that include this one with SPECEXPORT_ISA_NAME
// and SPECEXPORT_TABLE set. Compilers must not contract or reorder sums (-ffp-contract=off). Everything here is static or
// in an unnamed namespace: code compiled for one processor must not be linked into another's.
#include "attention.h"
#include "elementwise.h"
#include "tiles.h"

namespace specexport {

extern const Kernels SPECEXPORT_TABLE;
const Kernels SPECEXPORT_TABLE = {SPECEXPORT_ISA_NAME, kLayout,  quantize,   product, attention, unary,
                                  binary,              rms_norm, layer_norm, softmax, rotate,    multiply,
                                  nullptr,             nullptr};

}  // namespace specexport
