#include "weight_store.h"

#include <cstdlib>
#include <new>
#include <thread>

namespace specexport {

WeightStore::~WeightStore() {
  for (void* block : blocks_) std::free(block);
}

PackedWeights WeightStore::add(const Matrix& matrix) {
  PackedWeights form = packed_form(matrix);
  void* data = nullptr;
  if (posix_memalign(&data, 64, form.bytes() + 64)) throw std::bad_alloc();
  blocks_.push_back(data);
  pack(matrix, form, static_cast<uint8_t*>(data), int(std::thread::hardware_concurrency()));
  form.data = static_cast<const uint8_t*>(data);
  return form;
}

}  // namespace specexport
