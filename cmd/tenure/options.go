//go:build unix

package main

import (
	"encoding/json"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure"
)

// defaultType is the type of a key given without one.
const defaultType = "reconciler_lease"

// options are the flags that more than one command takes.
type options struct {
	store   storeFlag
	keyName string
	json    bool
}

// storeFlags defines the flags of all commands on a store.
func (o *options) storeFlags(c *cobra.Command) {
	o.urlAndSchemaFlags(c)
	c.Flags().StringVar(&o.store.table, "table", "", "`NAME` of the table of objects, on Postgres and SQLite, the same for all replicas (default objects)")
}

func (o *options) urlAndSchemaFlags(c *cobra.Command) {
	o.store.flags = c.Flags()
	c.Flags().StringVar(&o.store.flag, "store", "", "`PATH` of a SQLite file, for the processes of one host, or a postgres://, mysql://, nats://, etcd:// or kube:// URL; put a URL with a password into $"+storeEnv+" instead")
	c.Flags().StringVar(&o.store.schema, "schema", "", "`NAME` of the table's schema, on Postgres (default $"+schemaEnv+", or the first schema of the search_path that has the table)")
}

func (o *options) keyFlag(c *cobra.Command) {
	c.Flags().StringVar(&o.keyName, "key", "", "`NAME` of the lease, or TYPE/NAME, the type and ID of a program's Key; NAME alone means "+defaultType+"/NAME")
}

// leaseFlags defines the flags of a command on a lease.
func (o *options) leaseFlags(c *cobra.Command) {
	o.storeFlags(c)
	o.keyFlag(c)
	o.jsonFlag(c)
}

func (o *options) jsonFlag(c *cobra.Command) {
	c.Flags().BoolVar(&o.json, "json", false, "print JSON")
}

// key returns the key of the lease that --key names.
func (o *options) key() tenure.Key {
	if kind, id, ok := strings.Cut(o.keyName, "/"); ok {
		return tenure.Key{Type: kind, ID: id}
	}
	return tenure.Key{Type: defaultType, ID: o.keyName}
}

func (o *options) checkKey() error {
	if o.keyName == "" {
		return usageError("no lease: give --key")
	}
	if err := o.key().Validate(); err != nil {
		return usageError("--key: %v", err)
	}
	return nil
}

// view is what a command shows to people and programs.
type view interface{ print(w io.Writer) error }

// show prints a view, as JSON if that is what was asked for.
func (o *options) show(out *output, v view) error {
	if o.json {
		return json.NewEncoder(out.stdout).Encode(v)
	}
	return v.print(out.stdout)
}
