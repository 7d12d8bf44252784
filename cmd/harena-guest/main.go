// Command harena-guest is what runs beside a sandbox: its supervisor, and the
// workers that touch its files. The node's daemon starts it; people do not.
package main

import (
	"fmt"
	"os"

	"github.com/harena-dev/harena/internal/supervisor"
	"github.com/harena-dev/harena/internal/supervisor/files"
)

// version is set by the linker.
var version = "dev"

const usage = `harena-guest is started by harena:
  harena-guest supervise   keep one sandbox; descriptor 3 is the claim channel
  harena-guest files       work on a sandbox's files; descriptors 0, 1 and 3
  harena-guest version
`

func main() {
	mode := ""
	if len(os.Args) == 2 {
		mode = os.Args[1]
	}
	switch mode {
	case "supervise":
		if err := supervise(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case "files":
		os.Exit(files.WorkerMain(os.NewFile(0, "in"), os.NewFile(1, "out"), os.NewFile(3, "root")))
	case "version":
		fmt.Println(version)
	default:
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
}

func supervise() error {
	channel, err := supervisor.Channel()
	if err != nil {
		return err
	}
	return supervisor.Run(supervisor.Config{Version: version, Channel: channel, Prepare: prepare})
}
