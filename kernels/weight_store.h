// The packed weights of a program: in memory of its own, or in a file of the cache folder that processes share.
#pragma once

#include <string>
#include <vector>

#include "packing.h"
#include "program.h"

namespace specexport {

class WeightStore {
 public:
  explicit WeightStore(const Store& store) : store_(store) {}
  ~WeightStore();
  WeightStore(const WeightStore&) = delete;
  WeightStore& operator=(const WeightStore&) = delete;

  // Packs a matrix; the result's data stays valid as long as the store.
  PackedWeights add(const Matrix& matrix);
  // To be called when all are added.
  void finish() {}

 private:
  const Store store_;
  std::vector<void*> blocks_;
};

}  // namespace specexport
