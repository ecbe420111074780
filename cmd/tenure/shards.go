//go:build unix

package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// shardMembers is appended to the kind of shards to get the kind by which processes take part.
const shardMembers = "/member"

// printShards says how evenly shards are spread, for each kind of which processes have shards.
func printShards(w io.Writer, views []sessionView) error {
	of := make(map[string][]int) // how many shards each process has
	for _, v := range views {
		count := make(map[string]int)
		for _, k := range v.Claims {
			count[k.Kind] = k.Claims
		}
		for member := range count {
			if kind, ok := strings.CutSuffix(member, shardMembers); ok && v.State == stateHeld {
				of[kind] = append(of[kind], count[kind])
			}
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(of)) {
		total := 0
		for _, n := range of[kind] {
			total += n
		}
		if _, err := fmt.Fprintf(w, "%s: %d shards on %d processes, %d to %d on each\n",
			printable(kind), total, len(of[kind]), slices.Min(of[kind]), slices.Max(of[kind])); err != nil {
			return err
		}
	}
	return nil
}
