// The packed weights of a program: in private memory, or in a file of the cache folder shared by processes.
#pragma once

#include <string>
#include <vector>

#include "packing.h"
#include "program.h"

namespace specexport {

// Packs matrices, or opens packed ones. A file holds those of one program:
//
//   char[8]   "SPXPACK2"
//   uint64    the size of the file
//   uint64    a hash of the shapes of all matrices, in order, and of samples of what they were packed from
//   uint8     for each matrix, 1 if its scales are fp16
//   the matrices, each at a multiple of 64 bytes
//
// It is replaced atomically, so that partial files are never opened; a file with an unexpected header is rewritten.
class WeightStore {
 public:
  // Packs all matrices. Their forms' data stays valid as long as the store.
  WeightStore(const Store& store, const std::vector<Matrix>& matrices);
  ~WeightStore();
  WeightStore(const WeightStore&) = delete;
  WeightStore& operator=(const WeightStore&) = delete;

  const PackedWeights& operator[](size_t index) const { return forms_[index]; }

 private:
  // Sets the matrices' forms and where they lie, by the type of their scales.
  void lay_out(const std::vector<Matrix>& matrices, const std::vector<uint8_t>& half_scales);
  bool map(const std::string& path, uint64_t hash, const std::vector<Matrix>& matrices);
  bool write(const std::string& path, uint64_t hash, const std::vector<Matrix>& matrices);
  void place(const uint8_t* base);

  std::vector<PackedWeights> forms_;
  std::vector<size_t> offsets_;
  size_t size_ = 0;
  void* memory_ = nullptr;
  void* mapping_ = nullptr;
};

}  // namespace specexport
