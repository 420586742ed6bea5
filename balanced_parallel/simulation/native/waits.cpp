#include "waits.h"

#include <atomic>

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "call.h"

namespace simulation {
namespace {

// A function of Python. It writes an error message into the buffer if the wait is forbidden.
using Listener = void (*)(int device, const char* kind, char* message, int size);
std::atomic<Listener> listener{nullptr};

bool is_pinned(const at::Tensor& host) {
  return at::detail::getPrivateUse1Hooks().isPinnedPtr(host.storage().data());
}

// torch copies a tensor with gaps, or one that changes its layout, through pageable memory of the host (Copy.cu).
bool goes_directly(const at::Tensor& host, const at::Tensor& other) {
  if (host.sizes() != other.sizes()) return false;
  return host.is_contiguous() ||
      (host.dtype() == other.dtype() && host.strides() == other.strides() && host.is_non_overlapping_and_dense());
}

bool is_mask(const at::Tensor& index) {
  return index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
}

// An index on the host is copied, and a mask is converted to indices, whose number depends on values.
const char* wait_of_indices(const c10::IValue& indices) {
  if (!indices.isOptionalTensorList()) return nullptr;
  for (const std::optional<at::Tensor> index : indices.toOptionalTensorList()) {
    if (!index || !index->defined()) continue;
    if (!is_simulated(*index) && index->dim() > 0) return "copy from the host";
    if (is_mask(*index)) return "boolean mask";
  }
  return nullptr;
}

// Assigning one number through one mask is masked_fill. Python gives the number as a tensor on the device here, on the CPU for CUDA.
bool is_masked_fill(const c10::IValue& indices, const at::Tensor& value) {
  if (!indices.isOptionalTensorList()) return false;
  int masks = 0, others = 0;
  for (const std::optional<at::Tensor> index : indices.toOptionalTensorList())
    if (index && index->defined()) is_mask(*index) && is_simulated(*index) ? ++masks : ++others;
  return masks == 1 && others == 0 && value.numel() == 1;
}

bool is_host_number(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().dim() == 0 && !is_simulated(value.toTensor());
}

const char* wait_of(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto& name = op.schema().name();
  if (name == "aten::index") return wait_of_indices(arguments[1]);
  if (name == "aten::_index_put_impl_") {
    if (is_masked_fill(arguments[1], arguments[2].toTensor())) return nullptr;
    return is_host_number(arguments[2]) ? "copy from the host" : wait_of_indices(arguments[1]);
  }
  if (name == "aten::where" && (is_host_number(arguments[1]) || is_host_number(arguments[2]))) return "copy from the host";
  if (name.rfind("aten::masked_fill", 0) == 0 || name.rfind("aten::index_fill", 0) == 0) {  // their CUDA code calls value.item()
    const auto& value = arguments.back();
    return value.isTensor() && is_simulated(value.toTensor()) ? "item" : nullptr;
  }
  if (name == "aten::repeat_interleave" && !arguments.back().isNone()) return nullptr;  // output_size is given
  const bool reads_values = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  return reads_values ? name.c_str() + name.find(':') + 2 : nullptr;
}

}  // namespace

void wait_on_host(int device, const char* kind) {
  const auto call = listener.load();
  if (!call) return;
  char message[2048] = "";
  call(device, kind, message, sizeof(message));
  TORCH_CHECK(message[0] == '\0', message);
}

void report_copy(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  const bool to_host = !is_simulated(target);
  if (target.numel() == 0 || is_simulated(source) != to_host) return;  // without the host, or without data
  const auto& host = to_host ? target : source;
  const auto& other = to_host ? source : target;
  if (non_blocking && is_pinned(host) && goes_directly(host, other)) return;
  const char* kind = to_host ? (non_blocking ? "pageable copy to the host" : "copy to the host")
                             : (non_blocking ? "pageable copy from the host" : "copy from the host");
  wait_on_host(place(other), kind);
}

void report_operator(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, int device) {
  if (const char* kind = listener.load() ? wait_of(op, arguments) : nullptr) wait_on_host(device, kind);
}

}  // namespace simulation

extern "C" void simulation_listen(simulation::Listener listener) { simulation::listener = listener; }
