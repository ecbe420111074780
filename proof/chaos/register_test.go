package main

import (
	"testing"

	"github.com/anishathalye/porcupine"
)

func TestHistoriesOfARegisterAreChecked(t *testing.T) {
	created := op{Do: create, Value: "a", Outcome: done, Now: 5}
	for name, test := range map[string]struct {
		history []op // in order; operations with an unknown outcome may happen at any later time
		want    porcupine.CheckResult
	}{
		"a write without a condition":    {[]op{created, {Do: put, Value: "b", Outcome: done, Now: 9}, {Do: get, Outcome: done, Now: 9, Read: "b"}}, porcupine.Ok},
		"and one that goes back":         {[]op{created, {Do: put, Value: "b", Outcome: done, Now: 4}}, porcupine.Illegal},
		"a write is read":                {[]op{created, {Do: get, Outcome: done, Now: 5, Read: "a"}}, porcupine.Ok},
		"a write is lost":                {[]op{created, {Do: get, Outcome: notFound}}, porcupine.Illegal},
		"an old value is read":           {[]op{created, {Do: replace, Version: 5, Value: "b", Outcome: done, Now: 6}, {Do: get, Outcome: done, Now: 5, Read: "a"}}, porcupine.Illegal},
		"two replace one version":        {[]op{created, {Do: replace, Version: 5, Value: "b", Outcome: done, Now: 6}, {Do: replace, Version: 5, Value: "c", Outcome: done, Now: 7}}, porcupine.Illegal},
		"two create":                     {[]op{created, {Do: create, Value: "b", Outcome: done, Now: 6}}, porcupine.Illegal},
		"a version goes back":            {[]op{created, {Do: remove, Version: 5, Outcome: done}, {Do: create, Value: "b", Outcome: done, Now: 5}}, porcupine.Illegal},
		"a conflict with itself":         {[]op{created, {Do: replace, Version: 5, Value: "b", Outcome: conflict, Now: 5}}, porcupine.Illegal},
		"a lost answer to a write":       {[]op{created, {Do: replace, Version: 5, Value: "b", Outcome: unknown}, {Do: get, Outcome: done, Now: 8, Read: "b"}}, porcupine.Ok},
		"a lost request of a write":      {[]op{created, {Do: replace, Version: 5, Value: "b", Outcome: unknown}, {Do: get, Outcome: done, Now: 5, Read: "a"}}, porcupine.Ok},
		"a lost answer, then a conflict": {[]op{created, {Do: replace, Version: 5, Value: "b", Outcome: unknown}, {Do: remove, Version: 5, Outcome: conflict, Now: 7}}, porcupine.Ok},
		"a conflict without a cause":     {[]op{created, {Do: remove, Version: 5, Outcome: conflict, Now: 7}}, porcupine.Illegal},
		"a refused write is read":        {[]op{created, {Do: replace, Version: 5, Value: "b", Outcome: refused}, {Do: get, Outcome: done, Now: 8, Read: "b"}}, porcupine.Illegal},
		"a late effect after a delete":   {[]op{created, {Do: create, Value: "b", Outcome: unknown}, {Do: remove, Version: 5, Outcome: done}, {Do: get, Outcome: done, Now: 9, Read: "b"}}, porcupine.Ok},
	} {
		var history []porcupine.Operation
		for i, o := range test.history {
			back := int64(10*i + 5)
			if o.Outcome == unknown {
				back = int64(forever)
			}
			history = append(history, porcupine.Operation{Call: int64(10 * i), Output: o, Return: back})
		}
		if got := judge(history); got != test.want {
			t.Errorf("%s: got %s, want %s", name, got, test.want)
		}
	}
}
