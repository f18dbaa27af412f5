# CMake reads this file right after project(llama_cpp). It leaves out llama.cpp's common library, which the Python
# binding does not call: common and the image library are two thirds of the time of a full build.
set(LLAMA_BUILD_COMMON OFF)

# GCC before 14 (bug 114098) compiles AMX kernels that end in an illegal instruction; see tile-config.h.
function(include_tile_config)
  if(TARGET ggml-cpu AND CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
    target_compile_options(ggml-cpu PRIVATE "SHELL:-include \"${CMAKE_CURRENT_FUNCTION_LIST_DIR}/tile-config.h\"")
  endif()
endfunction()

# Compile one C file of this project into a library of ggml, with the given compiler options.
function(add_project_source library file)
  if(TARGET ${library} AND CMAKE_C_COMPILER_ID STREQUAL GNU)
    cmake_path(SET path NORMALIZE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../../${file}")
    target_sources(${library} PRIVATE "${path}")
    set_property(SOURCE "${path}" TARGET_DIRECTORY ${library}
      PROPERTY COMPILE_OPTIONS ${ARGN} $<$<BOOL:${GGML_NATIVE}>:-march=native>)
  endif()
endfunction()

# The encoders and searches are for x86-64 only: on other CPUs ggml itself is compiled with contracted multiply-adds,
# and the bytes would differ. Only the encoders must round as ggml does.
function(add_project_sources)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    add_project_source(ggml-base quant/native/encoders.c -ffp-contract=off)
    add_project_source(ggml-base quant/native/searches.c -O3 -ffp-contract=fast)
    add_project_source(ggml-base quant/native/blocks.c -O3)
    # ggml-cpu has OpenMP, whose threads gemm.c uses.
    add_project_source(ggml-cpu llmcli/runtime/binding/kernels/gemm.c -O3 -ffp-contract=fast)
  endif()
  add_project_source(ggml-base llmcli/runtime/binding/kernels/row.c -O3 -ffp-contract=fast)
endfunction()

cmake_language(DEFER CALL include_tile_config)  # the targets exist only later
cmake_language(DEFER CALL add_project_sources)
