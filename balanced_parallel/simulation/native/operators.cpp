// Operators on simulated devices: CPU kernels on the same memory, after the device checks of CUDA.
#include <algorithm>
#include <optional>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "call.h"
#include "streams.h"
#include "waits.h"

namespace simulation {
at::Generator host_generator(const at::Generator& generator);

namespace {

using c10::DispatchKey;

// Rules of CUDA for a CPU tensor next to tensors of a device: elementwise operators accept a 0-dim tensor, indices are copied.
bool is_accepted(const c10::OperatorHandle& op, const at::Tensor& stray, bool in_list) {
  const auto& name = op.schema().name();
  if (stray.device().type() != c10::kCPU) return false;
  if (stray.dim() == 0) {
    const auto names = {"floor_divide", "rsub", "index_put", "foreach", "fused_", "fill"};  // without the tag
    return stray.unsafeGetTensorImpl()->is_wrapped_number() || op.hasTag(at::Tag::pointwise) ||
        std::any_of(names.begin(), names.end(), [&](const char* part) { return name.find(part) != std::string::npos; });
  }
  return in_list && name.find("index") != std::string::npos;
}

void check_devices(const c10::OperatorHandle& op, const c10::Argument& argument, const at::Tensor& tensor, int device, bool in_list) {
  if (!tensor.defined() || place(tensor) == device || tensor.device().is_meta()) return;
  if (!is_accepted(op, tensor, in_list)) {
    const auto found = c10::str(
        "Expected all tensors to be on the same device, but got ", argument.name(), " is on ", tensor.device(),
        ", different from other tensors on sim:", device, " (when checking argument in method ", op.schema().name(), ")");
    TORCH_CHECK(!is_strict(), found);
    TORCH_WARN(found, ": copied, because the cluster is not strict.");
  }
  if (tensor.dim() > 0) move_bytes(place(tensor), device, static_cast<int64_t>(tensor.nbytes()));
}

bool is_view(const c10::OperatorHandle& op) {  // reads and writes no memory
  const auto& returns = op.schema().returns();
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

void refuse(const c10::OperatorHandle& op) {
  const auto name = c10::toString(op.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "Simulated devices run the kernels of the CPU, and '", name, "' has none for these tensors (only dense tensors are simulated). Write it "
      "with existing operators, and register the function: torch.library.impl('", name, "', 'PrivateUse1')(function). If it needs "
      "gradients, register it for 'AutogradPrivateUse1'.");
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  if (!op.hasComputedKernelForDispatchKey(DispatchKey::CPU)) refuse(op);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  Call call;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (value.isDevice()) call.look(value.toDevice());
    visit(value, [&](const at::Tensor& tensor, const auto&) { call.look(tensor); });
    if (value.isGenerator() && call.device() == -1) call.look(value.toGenerator().device());
  }
  check_device(call.device());
  report_operator(op, c10::ArrayRef<c10::IValue>(*stack).slice(first), call.device());
  std::optional<Launch> launch;
  if (!is_view(op)) launch.emplace(call.device());
  c10::SmallVector<at::Tensor, 4> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    const bool in_list = value.isOptionalTensorList();
    const bool is_written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    visit(value, [&](const at::Tensor& tensor, const auto& replace) {
      check_devices(op, arguments[i], tensor, call.device(), in_list);
      if (is_written) written.push_back(tensor);
      if (launch && place(tensor) != kHost && tensor.has_storage()) {
        Block* block = block_of(tensor.storage());
        is_written ? launch->writes(block, op.schema().name().c_str()) : launch->reads(block, op.schema().name().c_str());
      }
      replace(call.to_host(tensor));
    });
    if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      const auto generator = value.toGenerator();
      TORCH_CHECK(
          generator.device().type() == kType, "Expected a 'sim' device type for generator but found '", generator.device().type(), "'");
      value = host_generator(generator);
    } else if (value.isNone() && arguments[i].name() == "generator") {
      value = host_generator(at::globalContext().defaultGenerator({kType, static_cast<c10::DeviceIndex>(call.device())}));
    }
  }
  {
    BelowEverything guard;
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  }
  for (const auto& tensor : written) call.written(tensor);
  for (auto i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
    visit((*stack)[i], [&](const at::Tensor& tensor, const auto& replace) {
      if (tensor.defined() && tensor.layout() != at::kStrided) refuse(op);
      replace(call.from_host(tensor));
    });
}

// Registers all operators of torch with a CPU kernel. Convolutions are composites that would select a library of the device, so
// they are registered too.
const auto* registered = [] {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) continue;
    if (op->hasKernelForDispatchKey(DispatchKey::CPU) || name.name == "aten::convolution" || name.name == "aten::convolution_backward")
      library->impl(c10::toString(name).c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&run>());
  }
  return library;
}();

// Operators of other libraries, and the error for operators without a CPU kernel.
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

void run_nothing(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) { refuse(op); }
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_nothing>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_nothing>()); }
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_nothing>()); }
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_nothing>()); }

}  // namespace
}  // namespace simulation
