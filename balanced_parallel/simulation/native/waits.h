// Calls for which a GPU makes the host wait: the host reads a value, or torch's CUDA code synchronises.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace simulation {

// Reports that the host waits for a device. Throws if Python forbids it. The caller must not hold a lock: Python runs here.
void wait_on_host(int device, const char* kind);

void report_copy(const at::Tensor& target, const at::Tensor& source, bool non_blocking);
void report_operator(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, int device);

}  // namespace simulation
