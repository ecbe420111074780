//go:build unix

package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func unitCommand(out *output) *cobra.Command {
	o := &runOptions{}
	c := &cobra.Command{
		Use:   "unit --key NAME [flags of run] -- program [argument...]",
		Short: "print a systemd unit that runs a program under a lease",
		Long: `Unit prints a unit file for systemd that starts "tenure run" with the same flags and
arguments. The file has no URL of a store: put TENURE_STORE=URL into /etc/tenure.env, which
only root should be able to read.

    tenure unit --key web --unique-replica -- /opt/web/web >/etc/systemd/system/web.service

With KillMode=mixed only tenure sends SIGTERM to the program, and systemd kills what is left
in the unit at the end. With StartLimitIntervalSec=0 systemd starts tenure again however often
the store has refused it.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error { return o.printUnit(c.Flags(), out, args) },
	}
	o.runFlags(c)
	return c
}

// printUnit prints a unit that runs the program with the flags that were given.
func (o *runOptions) printUnit(flags *pflag.FlagSet, out *output, args []string) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	line := forSystemd(program) + " run"
	flags.Visit(func(f *pflag.Flag) {
		switch {
		case f.NoOptDefVal == "":
			line += " --" + f.Name + " " + forSystemd(f.Value.String())
		case f.Value.String() == f.NoOptDefVal:
			line += " --" + f.Name
		}
	})
	if len(args) > 0 {
		line += " --"
	}
	for _, arg := range args {
		line += " " + forSystemd(arg)
	}
	if schemeOf(o.store.flag) != nil || o.store.flag == "" && flags.Changed("store") {
		return usageError("a unit file is no place for a URL: put TENURE_STORE=URL into /etc/tenure.env, and leave out --store")
	}
	if o.store.flag != "" && !filepath.IsAbs(o.store.flag) {
		return usageError("--store %s is relative, and systemd starts the command in /: give the whole path", printable(o.store.flag))
	}
	environment := ""
	if o.store.flag == "" {
		environment += "EnvironmentFile=/etc/tenure.env\n"
		o.store.flag = cmp.Or(os.Getenv(storeEnv), "postgres://") // for validate
	}
	if !flags.Changed("replica") {
		environment += "Environment=TENURE_REPLICA_ID=%H\n"
		flags.Set("replica", "%H")
	}
	if _, err := o.validate(flags, args); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out.stdout, unit, forSystemd(o.key().String()), environment, line, (o.ttl+time.Second-1)/time.Second)
	return err
}

const unit = `[Unit]
Description=tenure run: %s
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
%sExecStart=%s
KillMode=mixed
TimeoutStopSec=%d
Restart=always
RestartSec=1

[Install]
WantedBy=multi-user.target
`

// forSystemd quotes an argument of a command line in a unit file. Systemd's escapes are those of Go and C.
func forSystemd(arg string) string {
	if harmless.MatchString(arg) && arg != "" {
		return arg
	}
	return strings.NewReplacer("%", "%%", "$", "$$").Replace(strconv.Quote(arg))
}
