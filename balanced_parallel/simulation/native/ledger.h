// Memory and traffic of the simulated devices in bytes: live and peak, by category, and copies between devices.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include <c10/core/Storage.h>

namespace simulation {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 64;      // largest number of devices
constexpr int kHost = kDevices;   // index of the CPU in the table of traffic

enum class Category : uint8_t { Parameters, Gradients, OptimizerState, Inputs, Activations, Other };
constexpr int kCategories = 6;

struct Use {  // use of memory by a kernel: the stream, and the time on the clock of that stream
  int stream = -1;
  uint64_t time = 0;
};

// One allocation. It outlives its memory while it belongs to a peak, because its category may be set later (that of a gradient by
// the step of the optimizer).
struct Block {
  const int64_t bytes;
  const int device;
  const uint64_t cluster;              // number of its cluster: a process may have several, one after the other
  std::atomic<Category> category;
  std::atomic<bool> fresh{true};       // no kernel has written to it yet
  int home = 0;                        // stream that it was allocated on, which gets the memory back
  Use written;                         // last write
  std::vector<Use> read;               // last read of each stream since the last write
  std::vector<int> recorded;           // streams given to record_stream
};

void start(int devices, const int64_t* capacities, bool strict);
void stop();
int device_count();                    // 0 outside a cluster
bool is_strict();
void check_device(int device);
uint64_t current_cluster();

c10::DataPtr allocate(size_t bytes, int device);             // throws c10::OutOfMemoryError over the capacity
c10::DataPtr adopt(c10::DataPtr host, size_t bytes, int device);  // counts memory that a CPU kernel has allocated
Block* block_of(const c10::DataPtr& pointer);                // null for a pointer without memory
inline Block* block_of(const c10::Storage& storage) { return block_of(storage.data_ptr()); }
void move_bytes(int source, int target, int64_t bytes);
bool in_backward();                    // False during recomputation of a forward
Category computed();                   // category of an operator's result

}  // namespace simulation
