// Collectives of torch.distributed on simulated devices, one process per device. The CPU backend (gloo) runs them on the same
// memory. Traffic between processes is not counted, because each process counts its own traffic only.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include "call.h"

namespace simulation {
namespace {

// The Work of the CPU backend, with the tensors of the caller as its result.
struct SimulatedWork final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> host;
  std::shared_ptr<Call> call;
  SimulatedWork(c10::intrusive_ptr<c10d::Work> from, std::shared_ptr<Call> by) : host(std::move(from)), call(std::move(by)) {}

  bool isCompleted() override { return host->isCompleted(); }
  bool isSuccess() const override { return host->isSuccess(); }
  std::exception_ptr exception() const override { return host->exception(); }
  int sourceRank() const override { return host->sourceRank(); }
  bool wait(std::chrono::milliseconds timeout) override { return host->wait(timeout); }
  void abort() override { host->abort(); }
  std::vector<at::Tensor> result() override {
    c10::IValue value = host->result();
    to_devices(value, *call);
    return value.toTensorVector();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = host->getFuture();
    return future->then(
        [call = call](c10::ivalue::Future& done) {
          auto value = done.value();
          to_devices(value, *call);
          return value;
        },
        future->elementType());
  }
  static void to_devices(c10::IValue& value, Call& call) {
    visit(value, [&](const at::Tensor& tensor, const auto& replace) { replace(call.from_host(tensor)); });
  }
};

void run_collective(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto call = std::make_shared<Call>();
  const auto count = op.schema().arguments().size();
  for (auto i = stack->size() - count; i < stack->size(); ++i)
    visit((*stack)[i], [&](const at::Tensor& tensor, const auto& replace) {
      call->look(tensor);
      replace(call->to_host(tensor));
    });
  {
    BelowEverything guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (auto i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    SimulatedWork::to_devices(value, *call);
    if (value.isCustomClass())
      value = c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<SimulatedWork>(value.toCustomClass<c10d::Work>(), call));
  }
}

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Replaces torch's kernels for this dispatch key, which need a separate backend for such devices.
const auto* collectives = [] {
  Quiet quiet;  // torch warns about kernels that are replaced
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto* library = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (op && name.name.rfind("c10d::", 0) == 0 && op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      library->impl(c10::toString(name).c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&run_collective>());
  }
  return library;
}();

}  // namespace
}  // namespace simulation

namespace c10d {
// DistributedDataParallel warns about a device type without a timer.
struct SimulatedTimer final : Timer {
  explicit SimulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, SimulatedTimer)
}  // namespace c10d
