// STAND-IN for nvbandwidth: it needs the driver, as the real one does, and measures nothing.
#include <boost/program_options.hpp>
#include <cuda.h>
#include <iostream>
#include <nvml.h>

void launch(const int *from, int *to);

int main(int argc, char **argv) {
  namespace options = boost::program_options;
  options::options_description known("nvbandwidth " VERSION " (stand-in)");
  known.add_options()("help,h", "Produce help message")("list,l", "List available testcases");
  options::variables_map given;
  options::store(options::parse_command_line(argc, argv, known), given);
  std::cout << "nvbandwidth Version: " VERSION << std::endl;
  if (given.count("help")) std::cout << known;
  if (given.count("list")) std::cout << "0, device_to_device_memcpy_read_ce: stand-in\n";
  if (cuInit(0) != CUDA_SUCCESS || nvmlInit_v2() != NVML_SUCCESS) return 1;
  launch(nullptr, nullptr);
  return 0;
}
