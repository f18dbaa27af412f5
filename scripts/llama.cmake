# Read right after project(llama_cpp): leaves out llama.cpp's common library, which the Python binding does not call.
# It and the image library are two thirds of the time of a full build.
set(LLAMA_BUILD_COMMON OFF)

# GCC before 14 (bug 114098) compiles AMX kernels that die of an illegal instruction; see tile-config.h.
function(load_whole_tile_config)
  if(TARGET ggml-cpu AND CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
    target_compile_options(ggml-cpu PRIVATE "SHELL:-include \"${CMAKE_CURRENT_FUNCTION_LIST_DIR}/tile-config.h\"")
  endif()
endfunction()

# Our own encoders go into libggml-base. Only for x86-64: elsewhere ggml's contract multiply-adds, and the bytes differ.
function(add_encoders)
  if(TARGET ggml-base AND CMAKE_C_COMPILER_ID STREQUAL GNU AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    cmake_path(SET file NORMALIZE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../quant/encoders.c")
    target_sources(ggml-base PRIVATE "${file}")
    set_property(SOURCE "${file}" TARGET_DIRECTORY ggml-base
      PROPERTY COMPILE_OPTIONS -ffp-contract=off $<$<BOOL:${GGML_NATIVE}>:-march=native>)
  endif()
endfunction()

# Our own search, too; how it rounds is its own affair.
function(add_searches)
  if(TARGET ggml-base AND CMAKE_C_COMPILER_ID STREQUAL GNU AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    cmake_path(SET file NORMALIZE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../quant/searches.c")
    target_sources(ggml-base PRIVATE "${file}")
    set_property(SOURCE "${file}" TARGET_DIRECTORY ggml-base
      PROPERTY COMPILE_OPTIONS -O3 -ffp-contract=fast $<$<BOOL:${GGML_NATIVE}>:-march=native>)
  endif()
endfunction()

# And the look at a row of logits.
function(add_row)
  if(TARGET ggml-base AND CMAKE_C_COMPILER_ID STREQUAL GNU)
    cmake_path(SET file NORMALIZE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../llmcli/runtime/binding/row.c")
    target_sources(ggml-base PRIVATE "${file}")
    set_property(SOURCE "${file}" TARGET_DIRECTORY ggml-base
      PROPERTY COMPILE_OPTIONS -O3 -ffp-contract=fast $<$<BOOL:${GGML_NATIVE}>:-march=native>)
  endif()
endfunction()

cmake_language(DEFER CALL load_whole_tile_config)  # once the targets are there
cmake_language(DEFER CALL add_encoders)
cmake_language(DEFER CALL add_searches)
cmake_language(DEFER CALL add_row)
