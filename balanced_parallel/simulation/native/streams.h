// Streams. What runs on one is in order; what runs on two is in order only where one has waited for the other.
//
// Every kernel has finished when its call returns, so nothing ever goes wrong here. What is kept is which stream could know of
// what, by a vector clock for each, as torch.cuda._sanitizer does; a use of memory that a GPU might do too early is an error.
#pragma once
#include <c10/core/Stream.h>

#include "ledger.h"

namespace simulation {

c10::Stream current_stream(int device);  // of the calling thread
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(int device);

void record_event(void** event, c10::Stream stream);
void destroy_event(void* event);
void wait_event(void* event, c10::Stream stream);
void synchronize_event(void* event);
void synchronize_stream(c10::Stream stream);  // the host has waited, and with it all that is called from here on
void synchronize_device(int device);

// One kernel, or one copy, on the current stream of a device.
class Launch {
 public:
  explicit Launch(int device);
  void reads(Block* block, const char* what) const { use(block, false, what); }
  void writes(Block* block, const char* what) const { use(block, true, what); }

 private:
  int stream_;
  uint64_t time_;
  void use(Block* block, bool writes, const char* what) const;
};

void born(Block& block);   // on a stream, which is given any memory that was freed to it
void freed(Block& block);  // to the stream that it was allocated on
void used_on(Block& block, c10::Stream stream);  // record_stream: the allocator waits for that stream
void wait_for_each_other(int device, int other);  // what torch does before and after a copy between devices

void reset_streams();

}  // namespace simulation
