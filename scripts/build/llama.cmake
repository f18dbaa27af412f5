# Read right after project(llama_cpp): leaves out llama.cpp's common library, which the Python binding does not call.
# It and the image library are two thirds of the time of a full build.
set(LLAMA_BUILD_COMMON OFF)

# GCC before 14 (bug 114098) compiles AMX kernels that die of an illegal instruction; see tile-config.h.
function(load_whole_tile_config)
  if(TARGET ggml-cpu AND CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
    target_compile_options(ggml-cpu PRIVATE "SHELL:-include \"${CMAKE_CURRENT_FUNCTION_LIST_DIR}/tile-config.h\"")
  endif()
endfunction()

# Our own C goes into a library of ggml's, each file with its options.
function(add_own library file)
  if(TARGET ${library} AND CMAKE_C_COMPILER_ID STREQUAL GNU)
    cmake_path(SET path NORMALIZE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../../${file}")
    target_sources(${library} PRIVATE "${path}")
    set_property(SOURCE "${path}" TARGET_DIRECTORY ${library}
      PROPERTY COMPILE_OPTIONS ${ARGN} $<$<BOOL:${GGML_NATIVE}>:-march=native>)
  endif()
endfunction()

# The encoders and the search only for x86-64: elsewhere ggml's own contract multiply-adds, and the bytes differ. How
# the search and the look at a row round is their own affair.
function(add_all_own)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    add_own(ggml-base quant/native/encoders.c -ffp-contract=off)
    add_own(ggml-base quant/native/searches.c -O3 -ffp-contract=fast)
    add_own(ggml-base quant/native/blocks.c -O3)
    add_own(ggml-cpu llmcli/runtime/binding/kernels/gemm.c -O3 -ffp-contract=fast)  # which has OpenMP, and its threads
  endif()
  add_own(ggml-base llmcli/runtime/binding/kernels/row.c -O3 -ffp-contract=fast)
endfunction()

cmake_language(DEFER CALL load_whole_tile_config)  # once the targets are there
cmake_language(DEFER CALL add_all_own)
