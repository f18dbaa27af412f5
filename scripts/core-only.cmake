# Read right after project(llama_cpp): leaves out llama.cpp's common library, which the Python binding does not call.
# It and the image library are two thirds of the time of a full build.
set(LLAMA_BUILD_COMMON OFF)
