//go:build unix

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"

	"github.com/tenurelib/tenure"
)

var resignCommand = command{
	name:     "resign",
	synopsis: "-store STORE -key NAME [-json]",
	summary:  "ask the holder to give the lease to another replica",
	about: `
Resign asks the replica that holds the lease to end its program, release the lease, and
stay away for long enough that another can win. It returns when the request is stored;
"tenure watch" shows what comes of it. A holder that has vanished cannot obey: then the
lease expires.`,
	define: func(flags *flag.FlagSet) action {
		var l lookup
		l.define(flags)
		return func(ctx context.Context, out *output, args []string) error {
			return l.request(ctx, out, args, "")
		}
	},
}

var handoverCommand = command{
	name:     "handover",
	synopsis: "-store STORE -key NAME -to REPLICA [-json]",
	summary:  "ask the holder to give the lease to a replica of your choice",
	about: `
Handover asks the replica that holds the lease to end its program and to leave the lease
to another, by its name. That one alone may begin for a while, then any. It returns when
the request is stored; "tenure watch" shows what comes of it.`,
	define: func(flags *flag.FlagSet) action {
		var l lookup
		l.define(flags)
		to := flags.String("to", "", "name of the `REPLICA` that shall be next, as it was given to tenure run -replica")
		return func(ctx context.Context, out *output, args []string) error {
			if *to == "" {
				return usageError("no replica: give -to")
			}
			return l.request(ctx, out, args, *to)
		}
	},
}

// request asks the holder to release the lease, to a replica if one is given.
func (l *lookup) request(ctx context.Context, out *output, args []string, to string) error {
	return l.on(ctx, args, func(ctx context.Context, store database) error {
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: l.key.key(), Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			return asUsage(err)
		}
		holding, err := lease.Read(ctx)
		if err == nil {
			err = lease.RequestHandover(ctx, to)
		}
		if errors.Is(err, tenure.ErrNotFound) {
			return fmt.Errorf("nobody holds %s", l.key.key())
		}
		if err != nil {
			return err
		}
		answer := requested{Key: l.key.key().String(), Holder: holding.Holder, To: to}
		if l.json {
			return writeJSON(out.stdout, answer)
		}
		return answer.print(out.stdout)
	})
}

// requested is the outcome of a request to a holder.
type requested struct {
	Key    string `json:"key"`
	Holder string `json:"holder"` // who was asked
	To     string `json:"to,omitempty"`
}

func (r requested) print(w io.Writer) error {
	var err error
	switch r.To {
	case "":
		_, err = fmt.Fprintf(w, "asked %s to release %s\n", printable(r.Holder), printable(r.Key))
	case r.Holder:
		_, err = fmt.Fprintf(w, "%s holds %s already\n", printable(r.Holder), printable(r.Key))
	default:
		_, err = fmt.Fprintf(w, "asked %s to leave %s to %s\n", printable(r.Holder), printable(r.Key), printable(r.To))
	}
	return err
}
