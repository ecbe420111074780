//go:build unix

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

var unitCommand = command{
	name:     "unit",
	synopsis: "-key NAME [flags of run] -- program [argument...]",
	summary:  "print a systemd unit that runs a program under a lease",
	about: `
Unit prints a unit file for systemd that starts "tenure run" with the same flags and
arguments. The file has no URL of a store: put TENURE_STORE=URL into /etc/tenure.env, which
only root should be able to read.

  tenure unit -key web -unique-replica -- /opt/web/web >/etc/systemd/system/web.service

With KillMode=mixed only tenure sends SIGTERM to the program, and systemd kills what is left
in the unit at the end.`,
	flags: runCommand.flags,
	takes: true,
	act: func(_ context.Context, o *options, out *output, args []string) error {
		if schemeOf(o.store.flag) != nil || o.store.flag == "" && o.store.given {
			return usageError("a unit file is no place for a URL: put TENURE_STORE=URL into /etc/tenure.env, and leave out -store")
		}
		if o.store.flag != "" && !filepath.IsAbs(o.store.flag) {
			return usageError("-store %s is relative, and systemd starts the command in /: give the whole path", printable(o.store.flag))
		}
		environment := ""
		if o.store.flag == "" {
			environment += "EnvironmentFile=/etc/tenure.env\n"
			o.store.flag = cmp.Or(os.Getenv(storeEnv), "postgres://") // for validate
		}
		if !o.given["replica"] {
			environment += "Environment=TENURE_REPLICA_ID=%H\n"
			o.given["replica"], o.replica = true, "%H"
		}
		if _, err := o.validate(args); err != nil {
			return err
		}
		program, err := os.Executable()
		if err != nil {
			return err
		}
		line := forSystemd(program) + " run"
		for _, arg := range o.line {
			line += " " + forSystemd(arg)
		}
		_, err = fmt.Fprintf(out.stdout, unit, forSystemd(o.key().String()), environment, line, (o.ttl+time.Second-1)/time.Second)
		return err
	},
}

const unit = `[Unit]
Description=tenure run: %s
Wants=network-online.target
After=network-online.target

[Service]
%sExecStart=%s
KillMode=mixed
TimeoutStopSec=%d
Restart=always

[Install]
WantedBy=multi-user.target
`

// forSystemd quotes an argument of a command line in a unit file. Systemd's escapes are those of Go and C.
func forSystemd(arg string) string {
	if harmless.MatchString(strings.ReplaceAll(arg, "/", "")) && arg != "" {
		return arg
	}
	return strings.NewReplacer("%", "%%", "$", "$$").Replace(strconv.Quote(arg))
}
