// An execution provider for ONNX Runtime: it claims groups of nodes, each of which runs as one program.

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ort_abi.h"
#include "ort_graph.h"
#include "program.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace specexport {
namespace {

constexpr const char* kName = "Specexport";  // options of a session begin with "ep." and this in small letters
constexpr size_t kSmall = 1024;              // bytes of the largest constants that nodes are chosen by

// A session's option for this provider; empty where it is not set.
std::string session_option(const Ort& ort, const OrtSessionOptions* options, const std::string& name) {
  std::string key = "ep.specexport." + name;
  int has = 0;
  ort.check(ort.has_session_config_entry(options, key.c_str(), &has));
  if (has == 0) return "";
  size_t size = 0;
  ort.check(ort.get_session_config_entry(options, key.c_str(), nullptr, &size));
  std::string value(size, '\0');
  ort.check(ort.get_session_config_entry(options, key.c_str(), value.data(), &size));
  value.resize(size - 1);  // without the closing zero
  return value;
}

// A fused node: its program, and what a run of it is lent.
class FusedNode : public OrtNodeComputeInfo {
 public:
  FusedNode(const Ort& ort, std::unique_ptr<Program> program, std::shared_ptr<Constants> constants, const Graph& graph,
            int threads)
      : OrtNodeComputeInfo{}, ort_(ort), constants_(std::move(constants)), program_(std::move(program)) {
    version = kStructVersion;
    create_state = [](OrtNodeComputeInfo* self, OrtNodeComputeContext*, void** state) -> OrtStatus* {
      *state = self;
      return nullptr;
    };
    compute = [](OrtNodeComputeInfo* self, void*, OrtKernelContext* context) {
      auto* node = static_cast<FusedNode*>(self);
      return node->ort_.guard([&] { node->run(context); });
    };
    release_state = [](OrtNodeComputeInfo*, void*) {};

    run_.threads = threads;
    run_.inputs.resize(graph.inputs.size());
    run_.output = [this](size_t index, const std::vector<int64_t>& dims) {
      OrtValue* value = nullptr;
      void* data = nullptr;
      ort_.check(ort_.context_output(context_, index, dims.data(), dims.size(), &value));
      ort_.check(ort_.tensor_mutable_data(value, &data));
      return data;
    };
    run_.parallel = [this](void (*work)(void*, size_t), void* argument, size_t count) {
      if (count == 1) return work(argument, 0);
      ort_.check(ort_.context_parallel(context_, work, count, 0, argument));
    };
  }

 private:
  void run(OrtKernelContext* context) {
    std::lock_guard<std::mutex> lock(mutex_);  // a session may be run by several threads at once
    context_ = context;
    for (size_t i = 0; i < run_.inputs.size(); ++i) {
      Tensor& tensor = run_.inputs[i];
      const OrtValue* value = nullptr;
      const int64_t* dims = nullptr;
      const void* data = nullptr;
      size_t rank = 0;
      int type = 0;
      ort_.check(ort_.context_input(context, i, &value));
      ort_.check(ort_.tensor_reference(value, &type, &dims, &rank));
      ort_.check(ort_.tensor_data(value, &data));
      tensor.type = static_cast<Type>(type);
      tensor.dims.assign(dims, dims + rank);
      tensor.data = const_cast<void*>(data);
    }
    program_->run(run_);
  }

  const Ort& ort_;
  std::shared_ptr<Constants> constants_;  // the program may read them
  std::unique_ptr<Program> program_;
  std::mutex mutex_;
  OrtKernelContext* context_ = nullptr;
  Run run_;
};

class Provider : public OrtEp {
 public:
  Provider(const Ort& ort, const OrtSessionOptions* options) : OrtEp{}, ort_(ort), constants_(std::make_shared<Constants>(ort)) {
    version = kStructVersion;
    get_name = [](const OrtEp*) { return kName; };
    get_capability = [](OrtEp* self, const OrtGraph* graph, OrtEpGraphSupportInfo* support) {
      auto* provider = static_cast<Provider*>(self);
      return provider->ort_.guard([&] { provider->claim_nodes(graph, support); });
    };
    OrtEp::compile = [](OrtEp* self, const OrtGraph** graphs, const OrtNode** fused, size_t count, OrtNodeComputeInfo** infos,
                        OrtNode**) {
      auto* provider = static_cast<Provider*>(self);
      return provider->ort_.guard([&] {
        for (size_t i = 0; i < count; ++i) infos[i] = provider->compile_group(graphs[i], fused[i]);
        provider->constants_->release_pages();
      });
    };
    release_compute_infos = [](OrtEp*, OrtNodeComputeInfo** infos, size_t count) {
      for (size_t i = 0; i < count; ++i) delete static_cast<FusedNode*>(infos[i]);
    };
    store_.folder = session_option(ort, options, "folder");
    store_.key = session_option(ort, options, "key");
    std::string threads = session_option(ort, options, "threads");
    char* end = nullptr;
    threads_ = threads.empty() ? 1 : static_cast<int>(std::strtol(threads.c_str(), &end, 10));
    if (threads_ < 1 || (end != nullptr && *end != '\0')) {
      throw std::runtime_error("ep.specexport.threads is '" + threads + "'; expected a number of threads, 1 or more");
    }
  }

 private:
  void claim_nodes(const OrtGraph* graph, OrtEpGraphSupportInfo* support) {
    Constants constants(ort_);
    OrtGraphReading reading = read_graph(ort_, graph, nullptr, constants, kSmall);
    OrtNodeFusionOptions options{kStructVersion, true};
    for (const std::vector<size_t>& group : claim(reading.graph)) {
      std::vector<const OrtNode*> nodes;
      for (size_t index : group) nodes.push_back(reading.nodes.at(index));
      ort_.check(ort_.add_nodes_to_fuse(support, nodes.data(), nodes.size(), &options));
    }
  }

  OrtNodeComputeInfo* compile_group(const OrtGraph* group, const OrtNode* fused) {
    Graph graph = read_graph(ort_, group, fused, *constants_, SIZE_MAX).graph;
    std::unique_ptr<Program> program = specexport::compile(graph, store_);
    return new FusedNode(ort_, std::move(program), constants_, graph, threads_);
  }

  const Ort& ort_;
  std::shared_ptr<Constants> constants_;
  Store store_;
  int threads_ = 1;
};

class Factory : public OrtEpFactory {
 public:
  explicit Factory(const OrtApi* api) : OrtEpFactory{}, ort_(api) {
    version = kStructVersion;
    get_name = [](const OrtEpFactory*) { return kName; };
    get_vendor = [](const OrtEpFactory*) { return "specexport"; };
    get_vendor_id = [](const OrtEpFactory*) { return uint32_t{0}; };
    get_version = [](const OrtEpFactory*) { return "1.0.0"; };
    get_supported_devices = [](OrtEpFactory* self, const OrtHardwareDevice* const* hardware, size_t count,
                               OrtEpDevice** devices, size_t most, size_t* found) {
      const Ort& ort = static_cast<Factory*>(self)->ort_;
      return ort.guard([&] {
        *found = 0;
        for (size_t i = 0; i < count && *found < most; ++i) {
          if (ort.hardware_device_type(hardware[i]) != kCpu) continue;
          ort.check(ort.create_ep_device(self, hardware[i], nullptr, nullptr, &devices[*found]));
          ++*found;
        }
      });
    };
    create_ep = [](OrtEpFactory* self, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const*, size_t,
                   const OrtSessionOptions* options, const OrtLogger*, OrtEp** provider) {
      const Ort& ort = static_cast<Factory*>(self)->ort_;
      return ort.guard([&] { *provider = new Provider(ort, options); });
    };
    release_ep = [](OrtEpFactory*, OrtEp* provider) { delete static_cast<Provider*>(provider); };
    // The memory of ONNX Runtime's own provider is used.
    create_allocator = [](OrtEpFactory*, const void*, const OrtKeyValuePairs*, void** allocator) -> OrtStatus* {
      *allocator = nullptr;
      return nullptr;
    };
    release_allocator = [](OrtEpFactory*, void*) {};
    create_data_transfer = [](OrtEpFactory*, void** transfer) -> OrtStatus* {
      *transfer = nullptr;
      return nullptr;
    };
    is_stream_aware = [](const OrtEpFactory*) { return false; };
  }

 private:
  Ort ort_;
};

}  // namespace
}  // namespace specexport

// The functions that ONNX Runtime looks for.

EXPORTED OrtStatus* CreateEpFactories(const char*, const OrtApiBase* base, const OrtLogger*, OrtEpFactory** factories,
                                      size_t most, size_t* count) {
  const OrtApi* api = base->get_api(specexport::kFunctionVersion);
  if (api == nullptr) {  // its first function has been there since the first version
    auto create_status = *reinterpret_cast<OrtStatus* (*const*)(int, const char*)>(base->get_api(1));
    std::string message = std::string("onnxruntime ") + base->get_version() + " is too old for specexport's kernels; expected 1.24 or newer";
    return create_status(specexport::kFail, message.c_str());
  }
  *count = 0;
  if (most == 0) return nullptr;
  factories[(*count)++] = new specexport::Factory(api);
  return nullptr;
}

EXPORTED OrtStatus* ReleaseEpFactory(OrtEpFactory* factory) {
  delete static_cast<specexport::Factory*>(factory);
  return nullptr;
}

// For those that load the library without ONNX Runtime.
EXPORTED const char* specexport_instruction_set() { return specexport::instruction_set(); }
