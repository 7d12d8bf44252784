package cli

import (
	"github.com/spf13/cobra"

	"github.com/harena-dev/harena/sdk/go/harena"
)

// later lists the commands that exist by name only, and why they are refused.
var later = []struct{ name, reason string }{
	{"port", "sandboxes have no network yet"},
	{"net", "sandboxes have no network yet"},
	{"guard", "guard policies are not built yet"},
	{"verify", "verification is not built yet"},
	{"fn", "function calls are not built yet; `harena run` runs a command in a sandbox of its own"},
	{"screenshot", "full virtual machines are not built yet"},
	{"input", "full virtual machines are not built yet"},
	{"project", "this version has one admin token and no projects"},
	{"principal", "this version has one admin token and no principals"},
	{"policy", "this version has one admin token and no policies"},
	{"quota", "quotas are not built yet"},
	{"token", "this version has one admin token, made by `harena up`"},
	{"login", "this version has one admin token, in the profile that `harena up` writes"},
	{"mirror", "mirrors are not built yet"},
	{"guest", "virtual machines are not built yet"},
	{"mcp", "the MCP server is not built yet"},
	{"simulate", "clusters are not built yet"},
	{"apiserver", "clusters are not built yet; `harena up` runs all roles on one machine"},
	{"watcher", "clusters are not built yet; `harena up` runs all roles on one machine"},
	{"edge", "clusters are not built yet; `harena up` runs all roles on one machine"},
	{"config", "clusters are not built yet; `harena up` is configured by its flags"},
	{"pki", "clusters are not built yet"},
}

func (a *app) addLater(root *cobra.Command) {
	for _, l := range later {
		root.AddCommand(laterCommand(l.name, l.name, l.reason))
	}
}

// laterCommand takes any arguments and refuses.
func laterCommand(name, what, reason string) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: "Not supported yet", Hidden: true, DisableFlagParsing: true,
		RunE: func(*cobra.Command, []string) error { return unsupported(what, reason) },
	}
}

func unsupported(what, reason string) error {
	return &harena.Error{Kind: harena.KindUnsupported, Message: "harena " + what + " is not supported", Hint: reason}
}
