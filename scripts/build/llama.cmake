# CMake reads this file right after project(llama_cpp). It leaves out llama.cpp's common library, which the Python
# binding does not call: common and the image library are two thirds of the time of a full build.
set(LLAMA_BUILD_COMMON OFF)

# GCC before 14 (bug 114098) compiles AMX kernels that end in an illegal instruction; see tile-config.h.
function(include_tile_config)
  if(TARGET ggml-cpu AND CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
    target_compile_options(ggml-cpu PRIVATE "SHELL:-include \"${CMAKE_CURRENT_FUNCTION_LIST_DIR}/tile-config.h\"")
  endif()
endfunction()

cmake_language(DEFER CALL include_tile_config)  # the target exists only later
