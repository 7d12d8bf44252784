module github.com/harena-dev/harena

go 1.26.0

require (
	connectrpc.com/connect v1.21.1
	github.com/klauspost/compress v1.20.4
	github.com/spf13/cobra v1.10.2
	github.com/spf13/pflag v1.0.9
	golang.org/x/sys v0.50.0
	golang.org/x/term v0.48.0
	google.golang.org/protobuf v1.36.12
)

require github.com/inconshreveable/mousetrap v1.1.0 // indirect
