//go:build unix

package main

import (
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

func manCommand(out *output) *cobra.Command {
	return &cobra.Command{
		Use:   "man [COMMAND]",
		Short: "print the manual page of this program, or of a command",
		Long: `Man prints the manual page tenure(1), or that of a command with its flags, as roff:

    tenure man run | man -l -`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			page, _, err := c.Root().Find(args)
			if err != nil {
				return usageError("there is no command %s", quoted(args[0]))
			}
			page.DisableAutoGenTag = true
			return doc.GenMan(page, nil, out.stdout)
		},
	}
}
