// Teams of threads: every part of a job is done once, whoever comes late.
#include <stdexcept>
#include <thread>

#include "../team.h"
#include "check.h"

namespace specexport::tests {

void test_team(Random& random) {
  const int threads = random.integer(1, 4), jobs = random.integer(0, 200);
  std::vector<int> sizes;
  for (int i = 0; i < jobs; i++) sizes.push_back(random.any_of({0, 1, 2, 3, 7, 40, 300}));
  const bool late = random.chance(0.3), fails = random.chance(0.2);
  Team team(threads);
  std::vector<int> counts;
  int walks = 0;
  auto walk = [&] {
    walks++;
    for (int size : sizes) {
      counts.assign(size_t(size), 0);  // plain memory: a part that two threads do, or that is not seen, is a race
      int sum = 0;
      team.split(size, [&](int part) { counts[size_t(part)] += part + 1; });
      for (int part = 0; part < size; part++) sum += counts[size_t(part)] - part - 1;
      expect(sum == 0, "a team of %d does parts of %d twice or never", threads, size);
    }
    if (fails) throw std::runtime_error("as the test wants it");
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++)
    others.emplace_back([&, i] {
      if (late) std::this_thread::sleep_for(std::chrono::microseconds(200 * i));
      team.enter(walk);
    });
  team.enter(walk);
  for (std::thread& thread : others) thread.join();
  expect(walks == 1, "%d threads of a team walk", walks);
  bool thrown = false;
  try {
    team.require_success();
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  expect(thrown == fails, "a team loses what its walk throws");
}

}  // namespace specexport::tests
