// A file mapped read-only.
#pragma once

#include <cstddef>
#include <string>

namespace specexport {

class MappedFile {
 public:
  // Throws std::runtime_error if the file cannot be mapped.
  explicit MappedFile(const std::string& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const char* data() const { return data_; }
  size_t size() const { return size_; }

  // Releases its pages to the system, which reads them again on use.
  void release_pages() const;

 private:
  const char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace specexport
