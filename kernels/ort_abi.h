// The used part of ONNX Runtime's stable C ABI, declared here because its wheels contain no headers. Its function tables
// only grow, so a function is identified by its index in its table; structs filled by a provider have a fixed layout, of
// which ONNX Runtime reads the part defined by the version in the first field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

struct OrtApi;
struct OrtEpApi;
struct OrtEpDevice;
struct OrtEpGraphSupportInfo;
struct OrtExternalInitializerInfo;
struct OrtGraph;
struct OrtHardwareDevice;
struct OrtKernelContext;
struct OrtKeyValuePairs;
struct OrtLogger;
struct OrtNode;
struct OrtNodeComputeContext;
struct OrtOpAttr;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo;
struct OrtValue;
struct OrtValueInfo;

struct OrtApiBase {
  const OrtApi* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

struct OrtEp;
struct OrtEpFactory;
struct OrtNodeComputeInfo;

struct OrtNodeFusionOptions {
  uint32_t version;
  bool drop_constant_initializers;
};

struct OrtNodeComputeInfo {
  uint32_t version;
  OrtStatus* (*create_state)(OrtNodeComputeInfo*, OrtNodeComputeContext*, void** state);
  OrtStatus* (*compute)(OrtNodeComputeInfo*, void* state, OrtKernelContext*);
  void (*release_state)(OrtNodeComputeInfo*, void* state);
};

// As of version 1.23; optional functions may be null.
struct OrtEp {
  uint32_t version;
  const char* (*get_name)(const OrtEp*);
  OrtStatus* (*get_capability)(OrtEp*, const OrtGraph*, OrtEpGraphSupportInfo*);
  OrtStatus* (*compile)(OrtEp*, const OrtGraph** graphs, const OrtNode** fused, size_t count, OrtNodeComputeInfo** infos,
                        OrtNode** context_nodes);
  void (*release_compute_infos)(OrtEp*, OrtNodeComputeInfo** infos, size_t count);
  void* get_preferred_data_layout;
  void* should_convert_data_layout;
  void* set_dynamic_options;
  void* on_run_start;
  void* on_run_end;
  void* create_allocator;
  void* create_sync_stream;
  void* get_compatibility_info;
};

// As of version 1.23.
struct OrtEpFactory {
  uint32_t version;
  const char* (*get_name)(const OrtEpFactory*);
  const char* (*get_vendor)(const OrtEpFactory*);
  OrtStatus* (*get_supported_devices)(OrtEpFactory*, const OrtHardwareDevice* const* hardware, size_t count,
                                      OrtEpDevice** devices, size_t most, size_t* found);
  OrtStatus* (*create_ep)(OrtEpFactory*, const OrtHardwareDevice* const* hardware, const OrtKeyValuePairs* const* metadata,
                          size_t count, const OrtSessionOptions*, const OrtLogger*, OrtEp** ep);
  void (*release_ep)(OrtEpFactory*, OrtEp*);
  uint32_t (*get_vendor_id)(const OrtEpFactory*);
  const char* (*get_version)(const OrtEpFactory*);
  void* validate_compatibility_info;
  OrtStatus* (*create_allocator)(OrtEpFactory*, const void* memory, const OrtKeyValuePairs* options, void** allocator);
  void (*release_allocator)(OrtEpFactory*, void* allocator);
  OrtStatus* (*create_data_transfer)(OrtEpFactory*, void** transfer);
  bool (*is_stream_aware)(const OrtEpFactory*);
  void* create_sync_stream;
};

namespace specexport {

constexpr uint32_t kStructVersion = 23;    // of the structs above
constexpr uint32_t kFunctionVersion = 24;  // of the newest function below
constexpr int kFail = 1;                   // OrtErrorCode
constexpr int kCpu = 0;                    // OrtHardwareDeviceType
constexpr int kTensor = 1;                 // ONNXType

// OrtOpAttrType
enum class Kind : int { kNone, kInteger, kIntegers, kNumber, kNumbers, kText, kTexts, kGraph, kTensor };

// The used functions of ONNX Runtime. Those that return a status return null on success.
struct Ort {
  OrtStatus* (*create_status)(int code, const char* message);
  const char* (*get_error_message)(const OrtStatus*);
  void (*release_status)(OrtStatus*);

  OrtStatus* (*get_session_config_entry)(const OrtSessionOptions*, const char* key, char* value, size_t* size);
  OrtStatus* (*has_session_config_entry)(const OrtSessionOptions*, const char* key, int* has);
  int (*hardware_device_type)(const OrtHardwareDevice*);
  OrtStatus* (*create_ep_device)(OrtEpFactory*, const OrtHardwareDevice*, const OrtKeyValuePairs* metadata,
                                 const OrtKeyValuePairs* options, OrtEpDevice** device);
  OrtStatus* (*add_nodes_to_fuse)(OrtEpGraphSupportInfo*, const OrtNode* const* nodes, size_t count,
                                  const OrtNodeFusionOptions*);

  OrtStatus* (*graph_model_path)(const OrtGraph*, const char** path);
  OrtStatus* (*graph_input_count)(const OrtGraph*, size_t*);
  OrtStatus* (*graph_inputs)(const OrtGraph*, const OrtValueInfo**, size_t);
  OrtStatus* (*graph_output_count)(const OrtGraph*, size_t*);
  OrtStatus* (*graph_outputs)(const OrtGraph*, const OrtValueInfo**, size_t);
  OrtStatus* (*graph_node_count)(const OrtGraph*, size_t*);
  OrtStatus* (*graph_nodes)(const OrtGraph*, const OrtNode**, size_t);

  OrtStatus* (*node_name)(const OrtNode*, const char**);
  OrtStatus* (*node_type)(const OrtNode*, const char**);
  OrtStatus* (*node_domain)(const OrtNode*, const char**);
  OrtStatus* (*node_since)(const OrtNode*, int*);
  OrtStatus* (*node_input_count)(const OrtNode*, size_t*);
  OrtStatus* (*node_inputs)(const OrtNode*, const OrtValueInfo**, size_t);
  OrtStatus* (*node_output_count)(const OrtNode*, size_t*);
  OrtStatus* (*node_outputs)(const OrtNode*, const OrtValueInfo**, size_t);
  OrtStatus* (*node_implicit_input_count)(const OrtNode*, size_t*);
  OrtStatus* (*node_implicit_inputs)(const OrtNode*, const OrtValueInfo**, size_t);
  OrtStatus* (*node_attribute_count)(const OrtNode*, size_t*);
  OrtStatus* (*node_attributes)(const OrtNode*, const OrtOpAttr**, size_t);
  OrtStatus* (*node_subgraph_count)(const OrtNode*, size_t*);

  OrtStatus* (*attribute_type)(const OrtOpAttr*, int*);
  OrtStatus* (*attribute_name)(const OrtOpAttr*, const char**);
  OrtStatus* (*read_attribute)(const OrtOpAttr*, int type, void* data, size_t bytes, size_t* needed);

  OrtStatus* (*value_name)(const OrtValueInfo*, const char**);
  OrtStatus* (*value_type)(const OrtValueInfo*, const OrtTypeInfo**);
  OrtStatus* (*value_is_constant)(const OrtValueInfo*, bool*);
  OrtStatus* (*value_initializer)(const OrtValueInfo*, const OrtValue**);
  OrtStatus* (*value_external)(const OrtValueInfo*, OrtExternalInitializerInfo**);
  void (*release_external)(OrtExternalInitializerInfo*);
  const char* (*external_path)(const OrtExternalInitializerInfo*);
  int64_t (*external_offset)(const OrtExternalInitializerInfo*);
  size_t (*external_bytes)(const OrtExternalInitializerInfo*);

  OrtStatus* (*type_kind)(const OrtTypeInfo*, int*);
  OrtStatus* (*type_as_tensor)(const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**);
  OrtStatus* (*tensor_element)(const OrtTensorTypeAndShapeInfo*, int*);
  bool (*tensor_is_ranked)(const OrtTensorTypeAndShapeInfo*);
  OrtStatus* (*tensor_rank)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatus* (*tensor_dims)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t);

  OrtStatus* (*context_input_count)(const OrtKernelContext*, size_t*);
  OrtStatus* (*context_input)(const OrtKernelContext*, size_t, const OrtValue**);
  OrtStatus* (*context_output)(OrtKernelContext*, size_t, const int64_t* dims, size_t rank, OrtValue**);
  OrtStatus* (*context_parallel)(const OrtKernelContext*, void (*work)(void*, size_t), size_t count, size_t batches, void*);
  OrtStatus* (*tensor_reference)(const OrtValue*, int* element, const int64_t** dims, size_t* rank);
  OrtStatus* (*tensor_data)(const OrtValue*, const void**);
  OrtStatus* (*tensor_mutable_data)(OrtValue*, void**);
  OrtStatus* (*tensor_bytes)(const OrtValue*, size_t*);

  Ort(const OrtApi* api) {
    const auto* table = reinterpret_cast<void* const*>(api);
    bind(table, 0, create_status);
    bind(table, 2, get_error_message);
    bind(table, 51, tensor_mutable_data);
    bind(table, 55, type_as_tensor);
    bind(table, 56, type_kind);
    bind(table, 60, tensor_element);
    bind(table, 61, tensor_rank);
    bind(table, 62, tensor_dims);
    bind(table, 88, context_input_count);
    bind(table, 90, context_input);
    bind(table, 91, context_output);
    bind(table, 93, release_status);
    bind(table, 237, has_session_config_entry);
    bind(table, 238, get_session_config_entry);
    bind(table, 272, read_attribute);
    bind(table, 274, context_parallel);
    bind(table, 289, value_name);
    bind(table, 290, value_type);
    bind(table, 307, hardware_device_type);
    bind(table, 318, tensor_bytes);
    bind(table, 326, value_initializer);
    bind(table, 327, value_external);
    bind(table, 331, value_is_constant);
    bind(table, 334, graph_model_path);
    bind(table, 338, graph_input_count);
    bind(table, 339, graph_inputs);
    bind(table, 340, graph_output_count);
    bind(table, 341, graph_outputs);
    bind(table, 344, graph_node_count);
    bind(table, 345, graph_nodes);
    bind(table, 349, node_name);
    bind(table, 350, node_type);
    bind(table, 351, node_domain);
    bind(table, 352, node_since);
    bind(table, 353, node_input_count);
    bind(table, 354, node_inputs);
    bind(table, 355, node_output_count);
    bind(table, 356, node_outputs);
    bind(table, 357, node_implicit_input_count);
    bind(table, 358, node_implicit_inputs);
    bind(table, 359, node_attribute_count);
    bind(table, 360, node_attributes);
    bind(table, 363, attribute_type);
    bind(table, 364, attribute_name);
    bind(table, 365, node_subgraph_count);
    bind(table, 369, release_external);
    bind(table, 370, external_path);
    bind(table, 371, external_offset);
    bind(table, 372, external_bytes);
    bind(table, 378, tensor_data);
    bind(table, 390, tensor_is_ranked);
    bind(table, 414, tensor_reference);

    const OrtEpApi* (*get_ep_api)();
    bind(table, 317, get_ep_api);
    const auto* providers = reinterpret_cast<void* const*>(get_ep_api());
    bind(providers, 0, create_ep_device);
    bind(providers, 2, add_nodes_to_fuse);
  }

  // Throws the error of a status.
  void check(OrtStatus* status) const {
    if (status == nullptr) return;
    std::string message = get_error_message(status);
    release_status(status);
    throw std::runtime_error(message);
  }

  // Runs a function that may throw, and returns ONNX Runtime's status.
  template <typename F>
  OrtStatus* guard(F&& body) const noexcept {
    try {
      body();
      return nullptr;
    } catch (const std::exception& error) {
      return create_status(kFail, error.what());
    } catch (...) {
      return create_status(kFail, "specexport's kernels failed for an unknown reason");
    }
  }

 private:
  template <typename F>
  static void bind(void* const* table, size_t index, F& function) {
    function = reinterpret_cast<F>(table[index]);
  }
};

}  // namespace specexport
